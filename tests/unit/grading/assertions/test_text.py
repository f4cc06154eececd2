"""Assertions of tests in other languages, found without a parser."""

import random

import pytest

from grading.assertions.text import text_sites

EXPECTED = {
    "node": ("a.test.js", "test('adds', () => {\n  assert.strictEqual(add(1, 2), 3);\n});\n", "3"),
    "jest": ("a.test.ts", "it('adds', () => { expect(add(1, 2)).toBe(3); }); // toBe(9)\n", "3"),
    "jest object": ("a.test.ts", "expect(parse('x')).toEqual(['a', 'b']);\n", "'a'|'b'"),
    "go": (
        "a_test.go",
        "func TestAdd(t *testing.T) {\n\tif got := Add(1, 2); got != 3 {\n\t\tt.Error(got)\n\t}\n}\n",
        "3",
    ),
    "go table": (
        "a_test.go",
        'func TestA(t *testing.T) {\n\tfor _, one := range []struct{ in, want string }{{in: "x", want: "y"}} {\n'
        '\t\tif got := F(one.in); got != one.want {\n\t\t\tt.Errorf("got %s, want %s", got, one.want)\n\t\t}\n\t}\n}\n',
        '"y"',
    ),
    "go table with a library": (
        "a_test.go",
        'var cases = []struct{ in, want string }{{in: "x", want: "y"}}\n\n'
        "func TestA(t *testing.T) { for _, one := range cases { require.Equal(t, one.want, F(one.in)) } }\n",
        '"y"',
    ),
    "rust": ("lib.rs", "#[test]\nfn adds() {\n    assert_eq!(add(1, 2), 3);\n}\n", "3"),
    "java": ("ATest.java", "@Test void adds() { assertEquals(3, Calc.add(1, 2)); }\n", "3"),
    "c++": ("a_test.cc", 'TEST(Add, Works) { EXPECT_EQ(add(1, 2), 3); EXPECT_STREQ("a", name()); }\n', '3|"a"'),
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


OTHER_RELATIONS = {
    "at least": ("a.test.js", "test('a', () => { expect(f()).toBeGreaterThanOrEqual(3); });\n"),
    "contains": ("a.test.js", "test('a', () => { expect(f()).toContain('b'); });\n"),
    "close": ("a.test.js", "test('a', () => { expect(f()).toBeCloseTo(3.14); });\n"),
    "with a delta": ("ATest.java", "@Test void a() { assertEquals(3.14, f(), 0.01); }\n"),
    "an error if equal": ("ATest.java", '@Test void a() { if (f() == 0) throw new AssertionError("none"); }\n'),
    "not equal": ("test.c", "int main(void) { assert(f() != 0); return 0; }\n"),
    "negated": ("test.c", "int main(void) { assert(!(f() == 0)); return 0; }\n"),
    "one of two": ("test.c", "int main(void) { assert(f() == 1 || f() == 2); return 0; }\n"),
    "none of two": ("a_test.go", "func TestA(t *testing.T) {\n\tif f() != 1 && f() != 2 {\n\t\tt.Fatal()\n\t}\n}\n"),
    "a loop's end": ("test.c", "int main(void) { for (int i = 0; i != 3; i++) assert(f(i)); return 0; }\n"),
    "a table of limits": (
        "a_test.go",
        "func TestA(t *testing.T) {\n\tfor _, one := range []struct{ wantAtLeast int }{{wantAtLeast: 2}} {\n"
        "\t\tif f() < one.wantAtLeast {\n\t\t\tt.Fatal()\n\t\t}\n\t}\n}\n",
    ),
    "a table of parts": (
        "a_test.go",
        'func TestA(t *testing.T) {\n\tfor _, one := range []struct{ want string }{{want: "b"}} {\n'
        "\t\tif !strings.Contains(f(), one.want) {\n\t\t\tt.Fatal()\n\t\t}\n\t}\n}\n",
    ),
    "a branch": ("a.test.js", "test('a', () => {\n  if (f()) {\n    assert.equal(g(), 3);\n  }\n});\n"),
    "a handler": (
        "a.test.js",
        "test('a', () => {\n  try { f() } catch (e) {\n    assert.equal(e.code, 3);\n  }\n});\n",
    ),
    "a loop over results": (
        "a.test.js",
        "test('a', () => {\n  for (const a of f()) {\n    assert.equal(a, 3);\n  }\n});\n",
    ),
    "a shell's limit": ("", '[ "$(./f)" != 0 ] || exit 1\n'),
    "a shell's error": ("", 'if [ "$(./f)" = 0 ]; then exit 1; fi\n'),
}


@pytest.mark.parametrize("name", OTHER_RELATIONS)
def test_a_neighbour_is_used_only_if_equality_is_required(name: str) -> None:
    file, source = OTHER_RELATIONS[name]
    for seed in range(5):
        for up in (True, False):
            sites = text_sites(source.encode(), file, random.Random(seed), up)
            assert "value" not in {site.kind for site in sites}, sites


def test_a_far_value_is_used_for_another_relation() -> None:
    for name in ("at least", "contains", "close", "with a delta"):
        file, source = OTHER_RELATIONS[name]
        [site] = [site for site in text_sites(source.encode(), file, random.Random(0)) if site.kind == "refused"]
        assert len(site.text) > 6


FAR: dict[str, tuple[str, str, set[str]]] = {
    "infinite": ("a.test.js", "expect(f()).toBeGreaterThan(0);\n", {"0"}),
    "infinite, typed": ("a.test.ts", "expect(f()).toBeLessThanOrEqual(-5);\n", {"5"}),
    "an order of texts": ("a.test.js", "assertGreaterThan(f(), 'm');\n", set()),
    "an order of arrays": ("a.test.js", "assertLessThan(f(), [3]);\n", set()),
    "an order elsewhere": ("ATest.java", "assertThat(f()).isGreaterThan(0);\n", set()),
    "a tolerance": ("a.test.js", "expect(f()).toBeCloseTo(3.14, 5);\n", {"3.14"}),
    "one of several": ("a.test.js", "assertIncludes(['a', 'b'], f());\n", set()),
    "part of a text": ("a.test.js", "assertIncludes('abc', f());\n", set()),
    "one of several in Ruby": ("a_test.rb", "assert_includes([1, 2], f())\n", set()),
    "part of a text in PHP": ("ATest.php", "<?php $this->assertStringContainsString(f(), 'abc');\n", set()),
    "in an array of PHP": ("ATest.php", "<?php $this->assertContains('b', f());\n", {"'b'"}),
    "has a text": ("a.test.js", "expect(f()).toContain('b');\n", {"'b'"}),
    "an end that is not found": ("a.test.js", "expect(f()).toContain(" + "(" * 80, set()),
    "begins": ("a.test.js", "expect(f()).toMatch('b');\n", {"'b'"}),
}


@pytest.mark.parametrize("name", FAR)
def test_a_far_value_satisfies_no_solution_or_is_left_out(name: str) -> None:
    file, source, changed = FAR[name]
    found = set()
    for seed in range(5):
        for up in (True, False):
            for site in text_sites(source.encode(), file, random.Random(seed), up):
                if site.kind == "refused":
                    found.add(source[site.start : site.end])
                    assert name not in ("infinite", "infinite, typed") or site.text == "Number.NaN"
    assert found == changed


@pytest.mark.parametrize("file", ["a.test.js", "a.test.mjs", "a.test.ts", "a.test.tsx"])
def test_an_expected_expression_is_changed_at_run_time(file: str) -> None:
    for call in ("assert.equal(f(a), wanted)", "expect(f(a)).toEqual(wanted)", "assert.equal(wanted, f(a))"):
        source = f"for (const [a, wanted] of cases) {{\n  test('x', () => {{ {call}; }});\n}}\n"
        [site] = [site for site in text_sites(source.encode(), file, random.Random(0)) if site.kind == "value"]
        [helper] = site.needs
        name = site.text.partition("(")[0]
        assert source[site.start : site.end] == "wanted" and site.text == f"{name}(wanted)"
        assert helper.at == len(source) and f"function {name}(value{': any' if '.ts' in file else ''})" in helper.text
        assert "near" not in name.lower()


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


def test_the_tester_of_go_is_none_of_the_values() -> None:
    for call in ("assert.Equal(t, Sum(1, 4), 5)", "require.Equal(t, 5, Sum(1, 4))"):
        source = f"func TestSum(t *testing.T) {{\n\t{call}\n}}\n".encode()
        found = [site for site in text_sites(source, "sum_test.go", random.Random(0)) if site.kind == "value"]
        assert [(site.function, site.text) for site in found] == [("TestSum", "6")], call
