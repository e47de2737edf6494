"""The text of problems and questions: count, fix, files with a limit on their number, and lines that answer."""

from __future__ import annotations

from pathlib import Path

from unet_trainer.datasets.problems import Choice, Problem, Question, describe_problems, first_few

ODD = ("odd file", "odd files")


def test_a_problem_shows_its_count_its_fix_and_its_files():
    problem = Problem("sizes", "small mask", "small masks", ("a.png: 3×2", "b.png: 1×1"), "make them larger")
    assert describe_problems([problem]) == "2 small masks:\n  Fix: make them larger\n  a.png: 3×2\n  b.png: 1×1"


def test_a_problem_of_one_file_is_singular_and_one_without_a_fix_begins_with_its_file():
    assert describe_problems([Problem("odd", *ODD, ("a",))]) == "1 odd file:\n  a"


def test_ten_lines_are_shown_and_the_others_counted_with_the_place_where_they_are():
    problem = Problem("odd", *ODD, tuple("abcdefghijkl"), "repair them")
    text = describe_problems([problem], where=" (elsewhere)")
    assert (
        text == "12 odd files:\n  Fix: repair them\n" + "".join(f"  {one}\n" for one in "abcdefghij") + "  … and 2 more (elsewhere)"
    )
    assert "more" not in describe_problems([problem], most=12)


def test_problems_follow_each_other_and_no_problem_is_no_text():
    first, second = Problem("a", "first", "firsts", ("x",)), Problem("b", "second", "seconds", ("y",))
    assert describe_problems([first, second]) == "1 first:\n  x\n1 second:\n  y"
    assert describe_problems([]) == ""


def test_a_question_ends_with_the_lines_that_answer_it():
    assert str(Question("which?")) == "which?"
    assert str(Question("which?", {"a": 1})) == "which?; set:\n  a: 1"
    assert str(Question("which?", {"a": 1}, {"a": 2})) == "which?; set one of these:\n  a: 1\n  a: 2"
    assert (
        str(Question("which?", {"a": 1, "b": (2, 3)}, {"a": 2})) == "which?; set one of these:\n  a: 1\n  b: [2, 3]\n  # or\n  a: 2"
    )


def test_answers_with_a_meaning_have_it_above_their_lines():
    question = Question("what is 255?", Choice("void", {"ignore_value": 255}), Choice("a class", {"num_classes": 3}))
    assert str(question) == (
        "what is 255?\n  One of these goes into the config:\n    # void\n    ignore_value: 255\n\n    # a class\n    num_classes: 3"
    )
    assert question.text == "what is 255?"
    assert "  This goes into the config:\n" in str(Question("?", Choice("void", {"ignore_value": 255})))


def test_the_first_few_items_are_named_and_the_others_counted():
    assert first_few("abc") == "a, b, c"
    assert first_few("abcdefg") == "a, b, c, d, e and 2 more"
    assert first_few((Path("x") / name for name in "abc"), 1) == "x/a and 2 more"
    assert first_few([]) == ""
