from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memra_lowlevel import cli
from memra_lowlevel.compile import DEFAULT_ARCHS, compiler, cuda_src_root
from memra_lowlevel.debug import compile_table
from memra_lowlevel.driver.host import build

KEYS = {"kernel", "arch", "registers", "spills", "local_bytes", "shared_bytes", "ms"}


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert cli.main(["compile", "--json", *words]) == 0
    table: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return table


def test_help_imports_nothing() -> None:
    program = (
        "import sys\nfrom memra_lowlevel import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit as e: assert e.code == 0\n"
        "heavy = ('numpy', 'memra_lowlevel.compile', 'cuda.bindings')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.splitlines()[-1] == "[]"
    for name, (_, text) in cli.COMMANDS.items():
        if name in ("doctor", "compile", "cache"):
            assert name in out.stdout and text in out.stdout


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("memra-lowlevel ")
    with pytest.raises(SystemExit) as caught:
        cli.main(["nonsense"])
    assert caught.value.code == 2


def test_subcommands_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "lost", ("memra_lowlevel.no_such_module", "gone"))
    assert cli.main(["lost"]) == 1
    assert "no_such_module" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "gone" not in capsys.readouterr().out


def test_all_architectures(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, "--all-archs", "--kernel", "counters")
    assert {row["arch"] for row in table} == set(DEFAULT_ARCHS)
    assert {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"} <= set(DEFAULT_ARCHS)
    names = {row["kernel"] for row in table}
    assert {"add_counters", "set_counters"} <= names
    assert len(table) == len(names) * len(DEFAULT_ARCHS)
    for row in table:
        assert set(row) == KEYS
        assert all(isinstance(row[k], int) for k in KEYS - {"kernel", "arch", "ms"})
        assert isinstance(row["ms"], float) and row["ms"] > 0 and row["spills"] == 0


def test_every_registered_instance_is_compiled() -> None:
    """The registry, the sources and the jobs name the same kernels, each once."""
    from memra_lowlevel.compile import kernel_sources
    from memra_lowlevel.kernels.registry import all_specs

    specs = all_specs()
    wanted = {(spec.source, e) for spec in specs for e in spec.expressions if "<" in e}
    apart = compile_table.jobs(["sm_90"], apart=True)
    single = [(job.source, name) for job in apart for name in job.name_expressions]
    together = [
        (job.source, name) for job in compile_table.jobs(["sm_90"]) for name in job.name_expressions
    ]
    for listed in (single, together):
        assert len(listed) == len(set(listed))
        assert wanted <= {
            (Path(source).relative_to(cuda_src_root()).as_posix(), n) for source, n in listed
        }
    assert all(len(job.name_expressions) <= 1 for job in apart)
    assert {job.source for job in apart} == set(kernel_sources())
    plain = {spec.source for spec in specs for e in spec.expressions if "<" not in e}
    bare = {
        Path(j.source).relative_to(cuda_src_root()).as_posix()
        for j in apart
        if not j.name_expressions
    }
    assert plain <= bare


def test_text_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "--arch", "compute_80", "--kernel", "set_counters"]) == 0
    head, *body = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "kernel",
        "arch",
        "registers",
        "spills",
        "local_bytes",
        "shared_bytes",
        "ms",
    ]
    assert [line.split()[:3] for line in body] == [["set_counters", "compute_80", "-"]]
    assert cli.main(["compile", "--kernel", "no_such_kernel"]) == 1
    assert "no_such_kernel" in capsys.readouterr().err
    assert cli.main(["compile", "--arch", "sm_1"]) == 1
    assert "ArchUnsupported" in capsys.readouterr().err


def test_host_rows(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, "--arch", "host", "--kernel", "set_counters")
    assert [(row["kernel"], row["arch"], row["registers"]) for row in table] == [
        ("set_counters", "host", None)
    ]


def test_a_kernel_that_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.cu", tmp_path / "bad.cu"
    good.write_text('extern "C" __global__ void good(int* a) { *a = 1; }\n')
    bad.write_text("int x = ;\n")
    jobs = [compiler.Job(bad, "sm_90"), compiler.Job(good, "sm_90")]
    monkeypatch.setattr(compile_table, "jobs", lambda *_, **__: jobs)
    assert cli.main(["compile", "--json", "--no-cache", "--workers", "1"]) == 1
    captured = capsys.readouterr()
    assert [row["kernel"] for row in json.loads(captured.out)] == ["good"]
    assert "bad.cu" in captured.err


def test_cache_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMRA_CACHE_DIR", str(tmp_path))
    compiler.clear_memory()
    assert cli.main(["compile", "--arch", "sm_80", "--kernel", "set_counters", "--json"]) == 0
    library = build.publish("kernel_none", lambda out: out.write_bytes(b"no real library") and None)
    assert library.parent == tmp_path / "host"
    capsys.readouterr()
    assert cli.main(["cache", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert {e["file"].split("/")[0] for e in entries} == {"kernels", "host"}
    assert cli.main(["cache", "verify"]) == 0
    assert ", 0 damaged" in capsys.readouterr().out
    path = next((tmp_path / "kernels").glob("*.kernel"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert cli.main(["cache", "verify"]) == 1
    out = capsys.readouterr().out
    assert "1 damaged" in out and f"kernels/{path.name}  DAMAGED" in out
    library.write_bytes(library.read_bytes()[:-1])
    assert cli.main(["cache", "verify"]) == 1
    assert "2 damaged" in capsys.readouterr().out
    assert cli.main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == len(entries)
    assert cli.main(["cache", "list", "--folder", str(tmp_path)]) == 0
    assert "0 files" in capsys.readouterr().out
