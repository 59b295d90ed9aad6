from __future__ import annotations

import pytest

from memra_lowlevel.compile import signature
from memra_lowlevel.compile.signature import ParamDecl


def params(declaration: str) -> tuple[ParamDecl, ...]:
    (found,) = signature.parse(declaration).values()
    return found.params


@pytest.mark.parametrize(
    ("text", "name", "ctype", "pointer", "pointee"),
    [
        ("const uint16_t* __restrict__ x", "x", "uint16_t*", True, "uint16_t"),
        ("float *y", "y", "float*", True, "float"),
        ("int", "", "int", False, ""),
        ("unsigned", "", "unsigned int", False, ""),
        ("unsigned n", "n", "unsigned int", False, ""),
        ("long unsigned int n", "n", "unsigned long", False, ""),
        ("unsigned long long n", "n", "unsigned long long", False, ""),
        ("signed char c", "c", "signed char", False, ""),
        ("std::uint32_t n", "n", "uint32_t", False, ""),
        ("float const* const* pp", "pp", "float**", True, "float*"),
        ("int table[4]", "table", "int*", True, "int"),
        ("const __grid_constant__ Params p", "p", "Params", False, ""),
        ("ns::Pair<int, 3> p", "p", "ns::Pair<int,3>", False, ""),
        ("typename T::row* r", "r", "typename T::row*", True, "typename T::row"),
        ("int n = (1, 2)", "n", "int", False, ""),
    ],
)
def test_one_parameter(text: str, name: str, ctype: str, pointer: bool, pointee: str) -> None:
    (p,) = params(f"__global__ void k({text}) {{}}")
    assert (p.name, p.ctype, p.pointer, p.pointee) == (name, ctype, pointer, pointee)


def test_markers_and_const() -> None:
    a, b, c = params("KERNEL void k(const int32_t* NULLABLE a, float* b, int32_t* const c) {}")
    assert (a.nullable, a.const) == (True, True)
    assert (b.nullable, b.const) == (False, False)
    assert (c.name, c.const) == ("c", False)


def test_functions_are_found_among_everything_else() -> None:
    found = signature.parse(
        """
        // __global__ void commented(int a);
        #define KERNEL extern "C" __global__
        #define MAKE(n) __global__ void n(int a)
        const char* s = "__global__ void text(int a)";
        KERNEL void none() {}
        KERNEL void empty(void) {}
        extern "C" __global__ void __launch_bounds__(32 * (4), 2) bounded(
            float* a,  // the first
            /* the second, */ int b) {}
        template <int D, typename T = float, class U>
        static __global__ __launch_bounds__(D) void many(T* x, const U* y, T z, int n) {}
        __device__ void helper(int a, int b);
        """
    )
    assert set(found) == {"none", "empty", "bounded", "many"}
    assert found["none"].params == () and found["empty"].params == ()
    assert [p.name for p in found["bounded"].params] == ["a", "b"]
    assert found["many"].template == ("D", "T", "U")
    assert found["many"].type_template == (False, True, True)


def test_template_types_are_put_in() -> None:
    found = signature.parse(
        "template <int D, typename T, class U> __global__ void f(T* x, const U* y, T z, int n) {}"
    )["f"]
    done = signature.specialise(found, "ns::f<64, float, Pair<int, 2>>")
    assert [p.ctype for p in done.params] == ["float*", "Pair<int, 2>*", "float", "int"]
    assert signature.split_name("ns::f<64, g<1,2>>") == ("f", ("64", "g<1,2>"))
    assert signature.split_name("f") == ("f", ())


def test_a_text_that_was_read_before_gives_an_answer_of_its_own() -> None:
    text = "__global__ void once(int* a) {}"
    first = signature.parse(text)
    first.clear()
    assert list(signature.parse(text)) == ["once"]
