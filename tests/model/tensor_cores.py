"""Products with the body for tensor cores on the host device, from text that may be changed."""

from memra_lowlevel.compile import compile_source, cuda_src_root
from memra_lowlevel.kernels import model as ops
from memra_lowlevel.kernels import registry

PRODUCTS = ("add_product", "gate_up_rows", "qkv_rows", "logits_rows")


def take(monkeypatch, headers=()):
    """Let launches on the host device have that body.

    Parameters
    ----------
    headers : iterable of path
        Folders whose ``common/*.cuh`` stand for the library's own.
    """
    plain = ops._kernel

    def kernel(device, name, shapes=(), **template):
        if name not in PRODUCTS:
            return plain(device, name, **template)
        assert device.kind == "host"
        spec = registry.spec(name)
        expression = spec.expression(**template)
        key = (__name__, *headers, expression)
        if key not in device.memo:
            text = (cuda_src_root() / spec.source).read_text()
            image = compile_source(
                f"#define MEMRA_TENSOR 1\n{text}", arch="host", name=spec.source,
                name_expressions=(expression,), include_dirs=(*headers, cuda_src_root()),
            )  # fmt: skip
            device.memo[key] = device.module(image).kernel(expression)
        return device.memo[key]

    monkeypatch.setattr(ops, "_kernel", kernel)
