from __future__ import annotations

import pytest

from memra_lowlevel.compile.tokens import includes, tokens


def words(text: str) -> list[str]:
    return [t.text for t in tokens(text)]


def test_comments_strings_and_directives() -> None:
    text = (
        'a // x "\n/* b */ c "d // e" \'"\' 1\'000.5e-3f\n#define F(x) \\\n  x /* y\n z */ w\n->f'
    )
    assert words(text) == [
        "a",
        "c",
        '"d // e"',
        "'\"'",
        "1'000.5e-3f",
        "#define F(x) \\\n  x /* y\n z */ w",
        "->",
        "f",
    ]


def test_offsets_point_into_the_text() -> None:
    text = 'int  x = R"q(#include "no")q"; // end'
    for token in tokens(text):
        assert text[token.start : token.end] == token.text


def test_hash_inside_a_line_is_no_directive() -> None:
    assert [t.kind for t in tokens("a # include <b>")][1] == "punct"


def test_includes_are_found_where_they_are_and_nowhere_else() -> None:
    text = "\n".join(
        [
            '// #include "commented.h"',
            '/* #include "block.h"',
            '#include "still_block.h" */',
            'const char* s = "\\n#include \\"string.h\\"";',
            'const char* r = R"(',
            '#include "raw.h"',
            ')";',
            '  #  include /* why */ "spaced.h"  // because',
            "#include <angle.h>",
            "#if 0",
            '#include "dead.h"',
            "#endif",
            "#inc\\",
            'lude "continued.h"',
            "#include MACRO",
            "#error don't",
            '#include "last.h"',
        ]
    )
    found = [(i.name, i.form, i.conditional) for i in includes(text)]
    assert found[:3] == [
        ("spaced.h", "quote", False),
        ("angle.h", "angle", False),
        ("dead.h", "quote", True),
    ]
    assert ("MACRO", "computed", False) in found
    assert found[-1] == ("last.h", "quote", False)
    assert not {"commented.h", "block.h", "still_block.h", "string.h", "raw.h"} & {
        name for name, _, _ in found
    }
    spaced = next(iter(includes(text)))
    assert text[spaced.start : spaced.end] == "spaced.h" and spaced.line == 8


@pytest.mark.parametrize(
    "text",
    ['#inc\\\nlude "c.h"', '# \\\n include "c.h"', '#/*\n*/include "c.h"', '#\tinclude"c.h"//x'],
)
def test_directives_over_several_lines_are_seen(text: str) -> None:
    assert [i.name for i in includes(text)] == ["c.h"]
    assert [i.name for i in includes(f"int a;\n{text}\nint important;\n")] == ["c.h"]


def test_unterminated_things_end() -> None:
    for text in ('"abc\n#include "x.h"', '\'\n#include "x.h"', "/* open", 'R"(open', "#"):
        list(tokens(text))
    assert [i.name for i in includes('"abc\n#include "x.h"')] == ["x.h"]
