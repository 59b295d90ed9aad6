"""Build the optional compiled modules and map the kernel sources; the rest is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

NATIVE = Path(__file__).parent / "memra_lowlevel" / "native"
BUILDERS = ["build.py", "build_layer_kv.py"]

setup(
    packages=[
        *find_packages(include=["memra_lowlevel*"]),
        "memra_lowlevel.cuda_src",
        "memra_lowlevel.examples",
        "memra_lowlevel.examples.hybrid",
        "memra_lowlevel.examples.smollm2",
    ],
    package_dir={
        "memra_lowlevel.cuda_src": "cuda_src",
        "memra_lowlevel.examples": "examples",
        "memra_lowlevel.examples.hybrid": "examples/hybrid",
        "memra_lowlevel.examples.smollm2": "examples/smollm2",
    },
    cffi_modules=[
        f"memra_lowlevel/native/{name}:ffibuilder" for name in BUILDERS if (NATIVE / name).exists()
    ],
)
