"""Tables of documents come from result files and say when their sources changed."""

import re

import pytest
from synthetic import write

from memra_lowlevel import errors
from memra_lowlevel.bench import sources, tables
from memra_lowlevel.bench.result import REPOSITORY, load

NAME = "benchmarks/results/2030-01-02-made.json"
BEFORE = f"Text.\n\n<!-- table: attend from {NAME} -->\n{tables.END}\n\nMore.\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    # The sources hold still here, whatever is being edited.
    monkeypatch.setattr(sources, "digest_of", lambda family: f"digest of {family}")
    (tmp_path / "docs").mkdir()
    write(tmp_path / NAME)
    (tmp_path / "docs" / "performance.md").write_text(BEFORE)
    return tmp_path


def document(root):
    return (root / "docs" / "performance.md").read_text()


def test_every_table_of_this_repository_is_what_its_result_file_says():
    assert [str(problem) for problem in tables.check(REPOSITORY)] == []


def test_write_fills_a_table_and_check_accepts_it(root):
    assert len(tables.check(root)) == 1
    assert document(root) == BEFORE  # a check writes nothing
    assert tables.main(["--root", str(root), "--write"]) == 0
    text = document(root)
    assert text.startswith("Text.\n") and text.endswith("More.\n")
    line = next(x for x in text.splitlines() if "ctx 4096" in x)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[0] == "32/8/128 ctx 4096, q8_0/q5_1"
    assert cells[2:] == ["3", "**3.77**", "0.2%", "80%", "✓ 3.9", "12"]
    assert "NVIDIA Made Up (cuda:0), commit 0123456789, 2030-01-02" in text
    assert tables.OLDER not in text
    assert tables.main(["--root", str(root)]) == 0


@pytest.mark.parametrize("kind", ["attend", "launch", "checks", "missing"])
def test_kinds(root, kind):
    lines = tables.render(kind, load(root / NAME), NAME)
    assert len(lines) >= 3 and NAME in lines[-1]
    if kind == "launch":
        assert any("1.03 ×" in line for line in lines)
    if kind == "missing":
        assert lines[0] == "* CuPy: not installed"


def test_a_changed_figure_is_found(root):
    tables.check(root, write=True)
    good = document(root)
    for old, new in (("**3.77**", "**3.67**"), ("| 12 |", "| 13 |"), ("0123456789", "1123456789")):
        assert old in good
        (root / "docs" / "performance.md").write_text(good.replace(old, new, 1))
        (problem,) = tables.check(root)
        assert "differs from its result file" in str(problem) and problem.line > 3
    # A new result file under the same name too.
    (root / "docs" / "performance.md").write_text(good)
    write(root / NAME, scale=1.1)
    assert len(tables.check(root)) == 1


def test_an_older_source_must_be_marked(root):
    tables.check(root, write=True)
    families = {**load(root / NAME).environment["families"], "attend": "other"}
    write(root / NAME, families=families)
    assert len(tables.check(root)) == 1
    assert tables.check(root, write=True) == []
    assert document(root).count(tables.OLDER) == 1
    # The mark goes when the sources are those of the file again.
    write(root / NAME)
    assert len(tables.check(root)) == 1
    tables.check(root, write=True)
    assert tables.OLDER not in document(root)
    # Another family does not matter.
    write(root / NAME, families={**families, "attend": load(root / NAME).environment["families"]["attend"], "model": "other"})  # fmt: skip  # noqa: E501
    assert tables.check(root) == []


def test_a_touched_result_file_is_found(root):
    tables.check(root, write=True)
    path = root / NAME
    path.write_text(path.read_text().replace('"passed": 7', '"passed": 8'))
    assert any("seal" in str(problem) for problem in tables.check(root))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<!-- table: attend from {NAME} -->\nno end\n", "has no"),
        (f"<!-- table: nonsense from {NAME} -->\n{tables.END}\n", "no table 'nonsense'"),
        (f"<!-- table: append from {NAME} -->\n{tables.END}\n", "no rows"),
        (f"<!-- table: attend from gone.json -->\n{tables.END}\n", "no result file"),
        ("| what | time, µs |\n|---|---|\n| a | 3.2 |\n", "outside a mark"),
        ("| what | time |\n|---|---|\n| a | 3.2 ms |\n", "outside a mark"),
    ],
)
def test_bad_marks_and_bare_tables(root, text, expected):
    (root / "README.md").write_text(text)
    (root / "docs" / "performance.md").unlink()
    (problem,) = tables.check(root)
    assert expected in str(problem)


def test_a_figure_is_drawn_from_the_file_it_names(root):
    mark = f"<!-- figure: docs/a.svg from {NAME} -->\n{tables.END}\n"
    (root / "docs" / "performance.md").write_text(mark)
    assert any("was not drawn from" in str(problem) for problem in tables.check(root))
    assert tables.check(root, write=True) == [] and tables.check(root) == []
    assert "](/docs/a.svg)" in document(root) and "commit 0123456789" in document(root)
    write(root / NAME, scale=1.5)
    assert any("was not drawn from" in str(problem) for problem in tables.check(root))
    assert tables.check(root, write=True) == []
    families = {**load(root / NAME).environment["families"], "attend": "other"}
    write(root / NAME, families=families)
    assert tables.check(root) and tables.check(root, write=True) == []
    assert tables.OLDER in document(root)


NEW = "benchmarks/results/2030-02-03-gpu-check-bench.json"
PENDING = f"""<!-- table: attend from pending -->
{tables.END}
<!-- table: append from pending -->
{tables.END}
<!-- figure: docs/a.svg from pending -->
{tables.END}
<!-- table: checks from pending:gpu-check-bench -->
{tables.END}
<!-- table: checks from pending:gpu-check-cuda12 -->
{tables.END}
"""


def test_marks_wait_for_a_file_and_move_to_a_newer_one(root):
    (root / "README.md").write_text(PENDING)
    tables.check(root, write=True)
    text = (root / "README.md").read_text()
    assert tables.check(root) == [] and text.count("*Not measured yet.*") == 5
    write(root / NEW, kind="cuda")
    words = ["--root", str(root), "--from", str(root / NEW), "--write"]
    assert tables.main(words) == 0 and tables.main(["--root", str(root)]) == 0
    text = (root / "README.md").read_text()
    # No rows of append, and the other check is another file.
    assert text.count("*Not measured yet.*") == 2 and "append from pending" in text
    assert f"attend from {NEW}" in text and f"docs/a.svg from {NEW}" in text
    assert f"checks from {NEW}" in text and "pending:gpu-check-cuda12" in text
    assert f"attend from {NEW}" in document(root)  # the same device, measured anew
    other = "benchmarks/results/2030-03-04-other.json"
    write(root / other, kind="cuda", device="Another (cuda:0)")
    assert tables.main(["--root", str(root), "--from", str(root / other), "--write"]) == 0
    assert f"attend from {NEW}" in document(root)
    path = root / other
    path.write_text(path.read_text().replace('"passed": 7', '"passed": 8'))
    with pytest.raises(errors.ArgumentError, match="seal"):
        tables.main(["--root", str(root), "--from", str(path)])


def test_tables_without_times_are_free(root):
    tables.check(root, write=True)
    (root / "README.md").write_text("| Python | 3.10 to 3.13 |\n|---|---|\n| items | 12 |\n")
    assert tables.check(root) == []


def test_an_unknown_kind_names_the_known(root):
    with pytest.raises(errors.ArgumentError, match=re.escape("attend, rows")):
        tables.render("other", load(root / NAME), NAME)
