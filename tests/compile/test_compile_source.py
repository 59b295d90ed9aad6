from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from memra_lowlevel.compile import cuda_src_root, kernel_sources, source
from memra_lowlevel.errors import CompileError, HeaderNotFound


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_h", ".h").replace("_cu", ".cu")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_own_sources_are_found() -> None:
    assert (cuda_src_root() / "common").is_dir()
    assert kernel_sources() == tuple(sorted(kernel_sources()))


def test_closure_is_recursive_and_by_content(tmp_path: Path) -> None:
    write(tmp_path, k_cu='#include "a.h"\n', a_h='#include "sub/b.h"\n')
    write(tmp_path, sub__b_h='#include "c.h"\n', sub__c_h="int c;\n")
    first = source.read(tmp_path / "k.cu", include_dirs=[tmp_path])
    assert [name for name, _ in first.headers] == ["a.h", "sub/b.h", "sub/c.h"]
    # A header beside its includer gets its canonical name, so that NVRTC finds it in memory.
    assert dict(first.headers)["sub/b.h"] == '#include "sub/c.h"\n'
    stamp = (tmp_path / "sub/c.h").stat()
    write(tmp_path, sub__c_h="int d;\n")
    import os

    os.utime(tmp_path / "sub/c.h", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = source.read(tmp_path / "k.cu", include_dirs=[tmp_path])
    assert second.digest != first.digest
    write(tmp_path, sub__c_h="int c;\n")
    assert source.read(tmp_path / "k.cu", include_dirs=[tmp_path]).digest == first.digest


def test_place_of_installation_is_not_part_of_the_digest(tmp_path: Path) -> None:
    digests = set()
    for place in ("one", "two"):
        folder = tmp_path / place
        write(folder, k_cu='#include "../inc/a.h"\n#include "b.h"\n', b_h="int b;\n")
        write(folder.parent / "inc", a_h="int a;\n")
        digests.add(source.read(folder / "k.cu").digest)
    assert len(digests) == 1


def test_two_headers_of_one_name_stay_apart(tmp_path: Path) -> None:
    write(tmp_path, x__u_h="int x;\n", y__u_h="int y;\n")
    write(tmp_path, x__k_cu='#include "u.h"\n#include "../y/k.h"\n', y__k_h='#include "u.h"\n')
    closure = source.read(tmp_path / "x/k.cu")
    texts = [text for _, text in closure.headers]
    names = [name for name, _ in closure.headers]
    assert len(set(names)) == 3 and "int x;\n" in texts and "int y;\n" in texts
    assert f'#include "{names[texts.index("int x;" + chr(10))]}"' in closure.text


def test_cycles_end(tmp_path: Path) -> None:
    write(tmp_path, k_cu='#include "a.h"\n', a_h='#pragma once\n#include "b.h"\n',
          b_h='#pragma once\n#include "a.h"\n')  # fmt: skip
    assert len(source.read(tmp_path / "k.cu").headers) == 2


def test_search_order(tmp_path: Path) -> None:
    write(tmp_path, own__k_cu='#include "h.h"\n', own__h_h="own", dir__h_h="dir")
    own = source.read(tmp_path / "own/k.cu", include_dirs=[tmp_path / "dir"])
    assert own.headers[0][1] == "own"
    text = source.read('#include "h.h"\n', include_dirs=[tmp_path / "dir"])
    assert text.headers[0][1] == "dir"
    angle = source.read(Path(tmp_path / "own/k.cu"), include_dirs=[tmp_path / "dir"])
    assert angle.headers[0][1] == "own"
    angle = source.read("#include <h.h>\n", include_dirs=[tmp_path / "dir"])
    assert angle.headers[0][1] == "dir"


def test_missing_header_says_where_it_was_looked_for(tmp_path: Path) -> None:
    write(tmp_path, k_cu='int a;\n#include "nope.h"\n')
    with pytest.raises(HeaderNotFound) as caught:
        source.read(tmp_path / "k.cu", include_dirs=[tmp_path / "inc"])
    error = caught.value
    assert error.name == "nope.h"
    assert error.searched == (str(tmp_path), str(tmp_path / "inc"), str(cuda_src_root()))
    assert error.diagnostics[0].line == 2 and "k.cu:2" in str(error)


def test_missing_header_under_a_condition_is_left_to_the_compiler() -> None:
    closure = source.read('#ifdef HOST\n#include "nope.h"\n#endif\n')
    assert [m.name for m in closure.missing] == ["nope.h"]


def test_macro_include_and_bad_encoding_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="macro"):
        source.read('#define X "a.h"\n#include X\n')
    (tmp_path / "k.cu").write_bytes(b"\xff\xfe")
    with pytest.raises(CompileError, match="UTF-8"):
        source.read(tmp_path / "k.cu")
    with pytest.raises(CompileError, match="cannot be read"):
        source.read(tmp_path / "absent.cu")


def test_sources_are_found_in_both_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the module inside a wheel's layout finds package data; beside one, the checkout."""
    package = tmp_path / "memra_lowlevel"
    (package / "compile").mkdir(parents=True)
    module = package / "compile" / "source.py"
    shutil.copy(source.__file__, module)
    monkeypatch.setattr(source, "__file__", str(module))
    with pytest.raises(HeaderNotFound, match="Install the package again"):
        source.cuda_src_root.__wrapped__()
    (tmp_path / "cuda_src" / "common").mkdir(parents=True)
    assert source.cuda_src_root.__wrapped__() == tmp_path / "cuda_src"
    (package / "cuda_src" / "common").mkdir(parents=True)
    assert source.cuda_src_root.__wrapped__() == package / "cuda_src"
