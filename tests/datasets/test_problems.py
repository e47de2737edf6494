"""The text of problems: count, title, files and fix, with a limit on the number of lines."""

from __future__ import annotations

from pathlib import Path

from unet_trainer.datasets.problems import Problem, describe_problems, first_few


def test_a_problem_shows_its_count_its_files_and_its_fix():
    problem = Problem("sizes", "masks that are too small", ("a.png: 3×2", "b.png: 1×1"), "make them larger")
    assert describe_problems([problem], 5) == "2 masks that are too small:\n  a.png: 3×2\n  b.png: 1×1\n  Fix: make them larger"


def test_a_problem_without_a_fix_ends_with_its_files():
    assert describe_problems([Problem("odd", "odd files", ("a",))], 5) == "1 odd files:\n  a"


def test_lines_above_the_limit_are_counted():
    problem = Problem("odd", "odd files", tuple("abcde"), "repair them")
    assert describe_problems([problem], 3) == "5 odd files:\n  a\n  b\n  c\n  … and 2 more\n  Fix: repair them"
    assert "more" not in describe_problems([problem], 5)


def test_problems_follow_each_other_and_no_problem_is_no_text():
    first, second = Problem("a", "first", ("x",)), Problem("b", "second", ("y",))
    assert describe_problems([first, second], 9) == "1 first:\n  x\n1 second:\n  y"
    assert describe_problems([], 9) == ""


def test_the_first_few_items_are_named_and_the_others_counted():
    assert first_few("abc") == "a, b, c"
    assert first_few("abcdefg") == "a, b, c, d, e and 2 more"
    assert first_few((Path("x") / name for name in "abc"), 1) == "x/a and 2 more"
    assert first_few([]) == ""
