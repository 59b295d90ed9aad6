"""Build the optional compiled module; everything else is in pyproject.toml."""

import os

from setuptools import find_packages, setup

have_native = os.path.exists(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "memra_lowlevel/native/build.py")
)

setup(
    packages=[*find_packages(include=["memra_lowlevel*"]), "memra_lowlevel.cuda_src"],
    package_dir={"memra_lowlevel.cuda_src": "cuda_src"},
    cffi_modules=["memra_lowlevel/native/build.py:ffibuilder"] if have_native else [],
)
