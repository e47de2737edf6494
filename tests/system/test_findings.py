"""Findings as text: a mark, a title, the detail below itself, and the fix."""

from __future__ import annotations

from unet_trainer.system.findings import WIDTH, Finding, finding_lines, has_problem, wrapped


def test_each_level_has_its_mark_and_the_fix_its_own_line():
    findings = [
        Finding("ok", "GPU", "an A100"),
        Finding("warning", "Disk", "little room", "make room"),
        Finding("problem", "A long title", "broken"),
    ]
    assert finding_lines(findings) == [
        "  ✓ GPU           an A100",
        "  ⚠ Disk          little room",
        "                  → make room",
        "  ✗ A long title  broken",
    ]


def test_short_titles_leave_the_same_room_in_every_section():
    assert finding_lines([Finding("ok", "GPU", "here")]) == ["  ✓ GPU         here"]


def test_lines_fit_the_width_unless_a_path_is_longer():
    lines = Finding("problem", "Files", "word " * 60 + "/a" * 80, "fix " * 60).lines(10)
    assert [line for line in lines if len(line) > WIDTH] == [" " * 16 + "/a" * 80]


def test_line_breaks_are_kept():
    assert wrapped("one\ntwo", "- ") == ["- one", "  two"]
    assert wrapped("", "- ") == ["- "]


def test_a_problem_is_found_among_others():
    assert not has_problem([Finding("ok", "", ""), Finding("warning", "", "")])
    assert has_problem([Finding("ok", "", ""), Finding("problem", "", "")])
