"""Digests by family: what ages a figure and what does not."""

import shutil

import pytest

from memra_lowlevel.bench import sources
from memra_lowlevel.compile import kernel_sources
from memra_lowlevel.compile.source import cuda_src_root


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Give a copy of package and kernels that digests are taken of."""
    cuda, package = tmp_path / "cuda_src", tmp_path / "memra_lowlevel"
    shutil.copytree(cuda_src_root(), cuda)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(sources.PACKAGE, package, ignore=ignored)
    monkeypatch.setattr(sources, "PACKAGE", package)
    monkeypatch.setattr(sources, "cuda_src_root", lambda: cuda)
    monkeypatch.setattr("memra_lowlevel.compile.source.cuda_src_root", lambda: cuda)
    return tmp_path


def aged(tree, path, change):
    before = sources.digests()
    target = tree / path
    old = target.read_text()
    new = change(old)
    assert new != old
    target.write_text(new)
    after = sources.digests()
    target.write_text(old)
    assert sources.digests() == before
    return {family for family in before if before[family] != after[family]}


def test_every_kernel_belongs_to_a_family():
    covered = {path for family in sources.FAMILIES for path in sources.files_of(family).values()}
    assert set(kernel_sources()) <= covered
    for family, patterns in sources.FAMILIES.items():
        for pattern in patterns:
            place, _, below = pattern.rpartition(":")
            root = cuda_src_root() if place else sources.PACKAGE
            assert any(root.glob(below)), (family, pattern)


def test_a_kernel_ages_its_families_only(tree):
    assert aged(tree, "cuda_src/kv/append.cu", lambda t: t + "\nint more;\n") == {
        "append", "round", "compile", "counters",
    }  # fmt: skip
    assert aged(tree, "cuda_src/bench/ceiling.cu", lambda t: t.replace("8 * stride", "4 * stride"))
    assert "layer_kv" in aged(tree, "memra_lowlevel/layer_kv/store.py", lambda t: t + "\nx = 1\n")
    assert aged(tree, "memra_lowlevel/bench/tables.py", lambda t: t + "\nx = 1\n") == set()


def test_a_header_ages_whoever_includes_it(tree):
    families = aged(tree, "cuda_src/common/counters.cuh", lambda t: t + "\nint more;\n")
    assert {"append", "attend", "rows"} <= families and "ceilings" not in families


def test_comments_and_docstrings_age_nothing(tree):
    for path, line in (
        ("cuda_src/kv/append.cu", "\n// a remark\n/* and\n another */\n"),
        ("cuda_src/common/counters.cuh", "\n// a remark\n"),
        ("memra_lowlevel/kernels/kv_append.py", "\n# a remark\n\n"),
    ):
        assert aged(tree, path, lambda t, line=line: t + line) == set()
    first = '"""Appending quantised rows'
    assert (
        aged(
            tree,
            "memra_lowlevel/kernels/kv_append.py",
            lambda t: t.replace(first, '"""Writing rows'),
        )
        == set()
    )
    path = "memra_lowlevel/kernels/kv_append.py"
    assert aged(tree, path, lambda t: t.replace("_THREADS = 128", "_THREADS = 64"))


def test_a_new_file_ages_its_family(tree):
    before = sources.digest_of("attend")
    (tree / "cuda_src" / "kv" / "attend_other.cu").write_text('#include "common/device.cuh"\n')
    assert sources.digest_of("attend") != before
