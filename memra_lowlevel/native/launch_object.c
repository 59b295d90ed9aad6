/* Python types whose method launch(stream) is the compiled path itself.
 *
 * A Python method around a call through cffi costs more than twice as much as the checks and the
 * trace. PreparedLaunch and GraphExec inherit `launch` from these types instead; it calls their
 * `_launch_code(stream, code)` for everything that is not the common case.
 *
 * The driver call blocks when the device's queue is full, and then others must be able to run, so
 * the interpreter lock is given away around it. That costs more than all checks together, so it is
 * kept while so little was launched since the stream was last waited for that the queue cannot be
 * full.
 */
typedef struct {
    PyObject_HEAD
    union {
        mll_plan plan;
        mll_exec exec;
    } u;
} mll_object;

static PyTypeObject *plan_type;

/* Runs `code = call;`, which calls the driver, with the interpreter lock or without it.
 * The calls are counted already. */
#define CALL_DRIVER(stream, call)                                                                  \
    do {                                                                                           \
        if (__builtin_expect(mll_has_room(stream, 0), 1)) {                                        \
            code = call;                                                                           \
        } else {                                                                                   \
            (stream)->device->n_unlocked++;                                                        \
            Py_BEGIN_ALLOW_THREADS                                                                 \
            code = call;                                                                           \
            Py_END_ALLOW_THREADS                                                                   \
        }                                                                                          \
    } while (0)

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
    mll_stream *s = p->bound;
    if (stream == p->bound_object && p->device != NULL && (code = mll_begin(p)) == MLL_OK)
        CALL_DRIVER(s, mll_end(p, s));
    return object_result(self, stream, code);
}

static int exec_run(mll_exec *x)
{
    mll_stream *s = x->bound;
    int code = mll_graph_begin(x);
    if (code == MLL_OK) {
        CALL_DRIVER(s, mll_graph_end(x, s));
        if (code == 0)
            mll_graph_note(x);
    }
    return code;
}

static PyObject *exec_launch(PyObject *self, PyObject *stream)
{
    mll_exec *x = &((mll_object *)self)->u.exec;
    int code = MLL_SLOW;
    if (stream == x->bound_object && x->device != NULL && !x->has_checks)
        code = exec_run(x);
    return object_result(self, stream, code);
}

/* _launch_bound(): launch where it is bound to, when Python has made its checks; gives the code. */
static PyObject *exec_launch_bound(PyObject *self, PyObject *none)
{
    (void)none;
    return PyLong_FromLong(exec_run(&((mll_object *)self)->u.exec));
}

/* launch_site(site, stream, block): addresses of the records and the packed parameters; the code. */
static PyObject *plan_launch_site(PyObject *type, PyObject *args)
{
    unsigned long long site, stream;
    PyObject *block;
    int code;
    (void)type;
    if (!PyArg_ParseTuple(args, "KKS", &site, &stream, &block))
        return NULL;
    mll_site *t = (mll_site *)(uintptr_t)site;
    mll_stream *s = (mll_stream *)(uintptr_t)stream;
    if ((code = mll_site_begin(t, s)) == MLL_OK)
        CALL_DRIVER(s, mll_site_end(t, s, PyBytes_AsString(block)));
    return PyLong_FromLong(code);
}

/* launch_all(stream, plans): None, or (code, index) where Python must go on. */
static PyObject *plan_launch_all(PyObject *type, PyObject *args)
{
    PyObject *stream, *given, *tuple;
    mll_plan *few[64], **plans = few;
    mll_stream *bound = NULL;
    uint32_t done = 0;
    int code = MLL_SLOW;
    (void)type;
    if (!PyArg_ParseTuple(args, "OO", &stream, &given))
        return NULL;
    if (!PyTuple_Check(given) && !PyList_Check(given))
        return Py_BuildValue("iI", code, done);
    tuple = PySequence_Tuple(given); /* keeps the plans alive while others run */
    if (tuple == NULL)
        return NULL;
    Py_ssize_t n = PyTuple_Size(tuple), i = 0;
    if (n > 64 && (plans = malloc((size_t)n * sizeof *plans)) == NULL) {
        Py_DECREF(tuple);
        return PyErr_NoMemory();
    }
    for (; i < n; i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);
        if (!PyObject_TypeCheck(item, plan_type))
            break;
        plans[i] = &((mll_object *)item)->u.plan;
        if (plans[i]->bound_object != stream || plans[i]->device == NULL)
            break;
        bound = plans[i]->bound;
    }
    if (i == n && n > 0 && n <= UINT32_MAX)
        code = mll_many_begin(plans, (uint32_t)n, bound, &done);
    if (code == MLL_OK) {
        uint64_t raw = mll_raw();
        CALL_DRIVER(bound, mll_many_end(plans, (uint32_t)n, bound, &done));
        mll_many_note(plans, done + (code != MLL_OK), bound, raw);
    }
    if (plans != few)
        free(plans);
    Py_DECREF(tuple);
    if (__builtin_expect(code == MLL_OK, 1))
        Py_RETURN_NONE;
    return Py_BuildValue("iI", code, done);
}

static PyMethodDef plan_methods[] = {
    {"launch", plan_launch, METH_O, "Launch on ``stream``, with the parameters as they are now."},
    {"launch_site", plan_launch_site, METH_VARARGS | METH_STATIC, "Launch packed arguments."},
    {"launch_all", plan_launch_all, METH_VARARGS | METH_STATIC, "Launch several plans in order."},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef exec_methods[] = {
    {"launch", exec_launch, METH_O, "Launch on ``stream``: one driver call."},
    {"_launch_bound", exec_launch_bound, METH_NOARGS, "Launch on the stream that it is bound to."},
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
    else if (!graph)
        plan_type = (PyTypeObject *)type;
    PyGILState_Release(state);
    return (uintptr_t)type;
}

uintptr_t mll_object_address(uintptr_t object)
{
    return object + offsetof(mll_object, u);
}
