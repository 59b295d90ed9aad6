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
#include <math.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    union {
        mll_plan plan;
        mll_exec exec;
    } u;
} mll_object;

/* Bases of MemoryView and Storage. To Python they are attributes like any others; they lie here so
 * that packing an argument is a few loads. */
typedef struct {
    PyObject_HEAD
    PyObject *storage, *dtype, *ptr, *closed;
} mll_view;

typedef struct {
    PyObject_HEAD
    PyObject *open, *context, *last;
} mll_storage;

static PyTypeObject *plan_type, *storage_type;

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

/* Packs one argument into its place. 0 if only Python can, or must refuse it by name; nothing is
 * converted here that it would not take as it is. */
static int pack(const mll_site *t, const mll_param *p, PyObject *arg, PyObject *stream, char *to)
{
    if (p->kind == MLL_POINTER) {
        uint64_t address = 0;
        if ((void *)Py_TYPE(arg) == t->buffer_type) {
            const mll_view *v = (const mll_view *)arg;
            const mll_storage *s = (const mll_storage *)v->storage;
            if (v->closed != Py_False || (p->dtype != NULL && v->dtype != p->dtype) ||
                s == NULL || !PyObject_TypeCheck(v->storage, storage_type) ||
                s->open != Py_True || s->context != t->context || s->last != stream ||
                v->ptr == NULL || !PyLong_CheckExact(v->ptr))
                return 0;
            address = PyLong_AsUnsignedLongLong(v->ptr);
            if (address == UINT64_MAX && PyErr_Occurred()) {
                PyErr_Clear();
                return 0;
            }
        } else if (arg != Py_None || !p->nullable) {
            return 0;
        }
        memcpy(to, &address, sizeof address);
        return 1;
    }
    if (p->kind == MLL_SIGNED || p->kind == MLL_UNSIGNED) {
        if (!PyLong_CheckExact(arg))
            return 0;
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(arg, &overflow);
        int bits = 8 * (int)p->size - (p->kind == MLL_SIGNED);
        if (overflow || (value < 0 && p->kind == MLL_UNSIGNED) ||
            (bits < 63 && (value < 0 ? ~value : value) >> bits))
            return 0; /* whole numbers from 2^63 on too */
        memcpy(to, &value, p->size); /* the lower bytes come first */
        return 1;
    }
    if (p->kind == MLL_BYTES) {
        if (!PyBytes_CheckExact(arg) || (uint64_t)PyBytes_Size(arg) != p->size)
            return 0;
        memcpy(to, PyBytes_AsString(arg), p->size);
        return 1;
    }
    if (!PyFloat_CheckExact(arg))
        return 0;
    double value = PyFloat_AsDouble(arg);
    if (p->kind == MLL_F64) {
        memcpy(to, &value, sizeof value);
        return 1;
    }
    if (fabs(value) > 0x1.fffffep127 && isfinite(value))
        return 0;
    float narrow = (float)value;
    memcpy(to, &narrow, sizeof narrow);
    return 1;
}

/* launch_args(site, stream, Stream, args): addresses of the records, the Python object, a tuple; the
 * code. Nothing is noted or launched unless every argument is packed, and was used there before. */
static PyObject *plan_launch_args(PyObject *type, PyObject *const *given, Py_ssize_t n_given)
{
    _Alignas(64) char block[MLL_BLOCK];
    (void)type;
    if (n_given != 4 || !PyTuple_Check(given[3])) {
        PyErr_SetString(PyExc_TypeError, "launch_args(site, stream, Stream, args)");
        return NULL;
    }
    const mll_site *t = (const mll_site *)PyLong_AsVoidPtr(given[0]);
    mll_stream *s = (mll_stream *)PyLong_AsVoidPtr(given[1]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *args = given[3];
    int code = MLL_ARGUMENT;
    if (t->params == NULL || PyTuple_Size(args) != (Py_ssize_t)t->n_params)
        return PyLong_FromLong(code);
    for (uint32_t i = 0; i < t->n_params; i++) {
        const mll_param *p = &t->params[i];
        if (!pack(t, p, PyTuple_GetItem(args, i), given[2], block + p->offset))
            return PyLong_FromLong(code);
    }
    if ((code = mll_site_begin((mll_site *)t, s)) == MLL_OK)
        CALL_DRIVER(s, mll_site_end(t, s, block));
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
    {"launch_args", (PyCFunction)(void (*)(void))plan_launch_args, METH_FASTCALL | METH_STATIC,
     "Pack arguments and launch."},
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

static PyMemberDef view_members[] = {
    {"_storage", T_OBJECT_EX, offsetof(mll_view, storage), 0, NULL},
    {"dtype", T_OBJECT_EX, offsetof(mll_view, dtype), 0, NULL},
    {"ptr", T_OBJECT_EX, offsetof(mll_view, ptr), 0, NULL},
    {"_closed", T_OBJECT_EX, offsetof(mll_view, closed), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMemberDef storage_members[] = {
    {"open", T_OBJECT_EX, offsetof(mll_storage, open), 0, NULL},
    {"context", T_OBJECT_EX, offsetof(mll_storage, context), 0, NULL},
    {"last", T_OBJECT_EX, offsetof(mll_storage, last), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static int view_traverse(PyObject *self, visitproc visit, void *arg)
{
    mll_view *v = (mll_view *)self;
    Py_VISIT(v->storage);
    Py_VISIT(v->dtype);
    Py_VISIT(v->ptr);
    Py_VISIT(v->closed);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int view_clear(PyObject *self)
{
    mll_view *v = (mll_view *)self;
    Py_CLEAR(v->storage);
    Py_CLEAR(v->dtype);
    Py_CLEAR(v->ptr);
    Py_CLEAR(v->closed);
    return 0;
}

static int storage_traverse(PyObject *self, visitproc visit, void *arg)
{
    mll_storage *s = (mll_storage *)self;
    Py_VISIT(s->open);
    Py_VISIT(s->context);
    Py_VISIT(s->last);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int storage_clear(PyObject *self)
{
    mll_storage *s = (mll_storage *)self;
    Py_CLEAR(s->open);
    Py_CLEAR(s->context);
    Py_CLEAR(s->last);
    return 0;
}

static void held_dealloc(PyObject *self, inquiry clear)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static void view_dealloc(PyObject *self) { held_dealloc(self, view_clear); }
static void storage_dealloc(PyObject *self) { held_dealloc(self, storage_clear); }

uintptr_t mll_held_type(int storage)
{
    PyType_Slot slots[] = {
        {Py_tp_members, storage ? storage_members : view_members},
        {Py_tp_traverse, storage ? storage_traverse : view_traverse},
        {Py_tp_clear, storage ? storage_clear : view_clear},
        {Py_tp_dealloc, storage ? storage_dealloc : view_dealloc},
        {0, NULL},
    };
    PyType_Spec spec = {
        storage ? "memra_lowlevel.native._launch.Storage" : "memra_lowlevel.native._launch.View",
        storage ? sizeof(mll_storage) : sizeof(mll_view), 0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots,
    };
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL)
        PyErr_Clear();
    else if (storage)
        storage_type = (PyTypeObject *)type;
    PyGILState_Release(state);
    return (uintptr_t)type;
}
