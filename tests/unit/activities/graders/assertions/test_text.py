"""Assertions of tests in other languages, found without a parser."""

import random

import pytest

from activities.graders.assertions.text import text_sites

EXPECTED = {
    "node": ("a.test.js", "test('adds', () => {\n  assert.strictEqual(add(1, 2), 3);\n});\n", "3"),
    "jest": ("a.test.ts", "it('adds', () => { expect(add(1, 2)).toBe(3); }); // toBe(9)\n", "3"),
    "jest object": ("a.test.ts", "expect(parse('x')).toEqual(['a', 'b']);\n", "'a'|'b'"),
    "go": (
        "a_test.go",
        "func TestAdd(t *testing.T) {\n\tif got := Add(1, 2); got != 3 {\n\t\tt.Error(got)\n\t}\n}\n",
        "3",
    ),
    "go table": ("a_test.go", 'var cases = []struct{ in, want string }{{in: "x", want: "y"}}\n', '"y"'),
    "rust": ("lib.rs", "#[test]\nfn adds() {\n    assert_eq!(add(1, 2), 3);\n}\n", "3"),
    "java": ("ATest.java", "@Test void adds() { assertEquals(3, Calc.add(1, 2)); }\n", "3"),
    "c++": ("a_test.cc", 'TEST(Add, Works) { EXPECT_EQ(add(1, 2), 3); EXPECT_STREQ("a", name()); }\n', "3"),
    "ruby": ("a_test.rb", "def test_adds # 7\n  assert_equal 3, add(1, 2)\nend\n", "3"),
    "php": ("ATest.php", "<?php\n$this->assertSame(3, add(1, 2));\n", "3"),
    "c": ("test.c", "int main(void) { assert(add(1, 2) == 3); return 0; }\n", "3"),
    "shell": ("", 'test "$(./add 1 2)" = "3" || exit 1\n', '"3"'),
    "shell word": ("", 'A=b test "$(cat a.txt)" = two\n', "two"),
    "shell number": ("", '[ "$(./add 1 2)" -eq 3 ] || exit 1\n', "3"),
}


@pytest.mark.parametrize("language", EXPECTED)
def test_the_expected_value_is_changed(language: str) -> None:
    name, source, expected = EXPECTED[language]
    values: set[str] = set()
    for seed in range(10):
        sites = text_sites(source.encode(), name, random.Random(seed))
        for site in sites:
            assert 0 <= site.start < site.end <= len(source) and site.text != source[site.start : site.end]
        values |= {source[site.start : site.end] for site in sites if site.kind == "value"}
    assert values == set(expected.split("|")) - {""}, values


def test_a_lifetime_is_no_string() -> None:
    source = 'fn f<\'a>(x: &\'a str) -> &\'a str { x }\n#[test]\nfn t() { assert_eq!(f("x"), "x"); }\n'
    sites = text_sites(source.encode(), "lib.rs", random.Random(0))
    assert {source[site.start : site.end] for site in sites if site.kind == "value"} == {'"x"'}


def test_bytes_that_are_no_text() -> None:
    source = b"\xff\xfe assert_eq!(add(1, 2), 3); \x00"
    sites = text_sites(source, "lib.rs", random.Random(0))
    assert {source[site.start : site.end] for site in sites if site.kind == "value"} == {b"3"}


@pytest.mark.parametrize("word", ["(", "'", '"', "assert.equal(", "a == ", "/*", "1", "`"])
def test_the_time_is_linear(word: str) -> None:
    """200 kB of one word: quadratic work would take minutes, and the test's time limit is far below."""
    text_sites((word * (200_000 // len(word))).encode(), "a.js", random.Random(0))


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        (
            "a_test.go",
            "func TestA(t *testing.T) { if f() != 1 {} }\nfunc TestB(t *testing.T) { if f() != 2 {} }",
            "TestA TestB",
        ),
        (
            "a.test.js",
            "test('one', () => { assert.equal(f(), 1); });\nit(\"two\", () => { assert.equal(f(), 2); });",
            "one two",
        ),
        ("lib.rs", "#[test] fn a() { assert_eq!(f(), 1); } #[test] fn b() { assert_eq!(f(), 2); }", "a b"),
        (
            "ATest.java",
            "@Test void a() { assertEquals(1, f()); } @Test public void b() { assertEquals(2, f()); }",
            "a b",
        ),
    ],
)
def test_the_test_of_an_assertion(name: str, source: str, expected: str) -> None:
    sites = text_sites(source.encode(), name, random.Random(0))
    assert [site.function for site in sites if site.kind == "value"] == expected.split()
