/* Python types whose method launch(stream) is the compiled path itself.
 *
 * A Python method around a call through cffi costs more than twice as much as the checks and the
 * trace. PreparedLaunch and GraphExec inherit `launch` from these types instead; it calls their
 * `_launch_code(stream, code)` for everything that is not the common case. The interpreter lock is
 * given away around the driver call, which blocks when the device's queue is full.
 */
typedef struct {
    PyObject_HEAD
    union {
        mll_plan plan;
        mll_exec exec;
    } u;
} mll_object;

static PyObject *object_result(PyObject *self, PyObject *stream, int code)
{
    if (__builtin_expect(code == MLL_OK, 1))
        Py_RETURN_NONE;
    return PyObject_CallMethod(self, "_launch_code", "Oi", stream, code);
}

static PyObject *plan_launch(PyObject *self, PyObject *stream)
{
    mll_plan *p = &((mll_object *)self)->u.plan;
    int code = MLL_SLOW;
    if (stream == p->bound_object && p->device != NULL) {
        Py_BEGIN_ALLOW_THREADS
        code = mll_launch(p);
        Py_END_ALLOW_THREADS
    }
    return object_result(self, stream, code);
}

static PyObject *exec_launch(PyObject *self, PyObject *stream)
{
    mll_exec *x = &((mll_object *)self)->u.exec;
    int code = MLL_SLOW;
    if (stream == x->bound_object && x->device != NULL && !x->has_checks) {
        Py_BEGIN_ALLOW_THREADS
        code = mll_graph_launch(x);
        Py_END_ALLOW_THREADS
    }
    return object_result(self, stream, code);
}

static PyMethodDef plan_methods[] = {
    {"launch", plan_launch, METH_O, "Launch on ``stream``, with the parameters as they are now."},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef exec_methods[] = {
    {"launch", exec_launch, METH_O, "Launch on ``stream``: one driver call."},
    {NULL, NULL, 0, NULL},
};

uintptr_t mll_object_type(int graph)
{
    PyType_Slot slots[] = {{Py_tp_methods, graph ? exec_methods : plan_methods}, {0, NULL}};
    PyType_Spec spec = {
        graph ? "memra_lowlevel.native._launch.Exec" : "memra_lowlevel.native._launch.Plan",
        sizeof(mll_object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots,
    };
    /* cffi calls without the lock. */
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL)
        PyErr_Clear();
    PyGILState_Release(state);
    return (uintptr_t)type;
}

uintptr_t mll_object_address(uintptr_t object)
{
    return object + offsetof(mll_object, u);
}
