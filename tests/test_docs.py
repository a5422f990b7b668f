"""The commands in README.md and docs/ work: every ```sh block runs, page by page, in order.

A block that can't run here carries its reason on the line before the fence: `<!-- not run: needs a GPU -->`. The lines
`make test` and `make demo` are left out: the one is this suite, the other takes a quarter of an hour.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
from conftest import ROOT

PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.is_file()]
_FENCE = re.compile(r"^ *```+ *(?P<language>\S*).*$")
_REASON = re.compile(r"^ *<!-- *not run: *(?P<reason>.*?) *-->$")
_LEFT_OUT = re.compile(r"^make (test|demo)\b(?!-)")
_SECONDS_A_PAGE = 600


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, text, first line in the page, and why it isn't run ("" where it is)."""

    language: str
    text: str
    line: int
    reason: str


def blocks(markdown: str) -> list[Block]:
    """The fenced blocks of a page. Raises: AssertionError for a fence without an end or a reason without a word."""
    found, reason = [], ""
    lines = iter(enumerate(markdown.splitlines(), start=1))
    for number, line in lines:
        if told := _REASON.match(line):
            assert told["reason"], f"line {number}: a block is not run, without a reason"
            reason = told["reason"]
        elif fence := _FENCE.match(line):
            inside = []
            for _, text in lines:
                if text.strip().startswith("```"):
                    break
                inside.append(text)
            else:
                raise AssertionError(f"line {number}: this fence has no end")
            found.append(Block(fence["language"], dedent("\n".join(inside)), number + 1, reason))
            reason = ""
        elif line.strip():
            reason = ""
    return found


def script(page: list[Block]) -> str:
    """The page's commands as one script: a later block sees the variables and folder of an earlier one."""
    parts = ["set -euo pipefail"]
    for block in page:
        if block.language == "sh" and not block.reason:
            kept = [line for line in block.text.splitlines() if not _LEFT_OUT.match(line)]
            parts += [f"# line {block.line}", *kept]
    return "\n".join(parts) + "\n"


def run_page(markdown: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a page in a folder that shows the checkout, so that nothing is written into the checkout itself."""
    for entry in ROOT.iterdir():
        if entry.name not in {"runs", ".git", ".work"}:
            (folder / entry.name).symlink_to(entry)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-x", "-c", script(blocks(markdown))],
        cwd=folder,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS_A_PAGE,
    )


@pytest.mark.timeout(_SECONDS_A_PAGE + 30)
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_page_work(page: Path, tmp_path: Path, demo_target: Path) -> None:
    ran = run_page(page.read_text(encoding="utf-8"), tmp_path)
    assert ran.returncode == 0, f"{page}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_blocks_are_marked_sh_and_show_no_prompt(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.language not in {"bash", "shell", "console", "zsh"}, (
            f"{page}:{block.line}: mark it `sh`: it is run"
        )
        assert block.language != "sh" or not block.text.startswith("$ "), (
            f"{page}:{block.line}: a prompt can't be pasted"
        )


SAMPLE = """
# Title
```sh
make demo
kept=yes; echo one > made.txt
```
<!-- not run: needs a GPU -->
```sh
false
```
<!-- not run: about another thing -->
Words in between.
1. In a list:
   ```sh
   make test
   test "$kept" = yes; cat made.txt; ls README.md src/eyas > /dev/null || true
   ```
```toml
[target]
```
"""


def test_blocks_are_found_with_language_line_and_reason() -> None:
    found = blocks(SAMPLE)
    assert [(block.language, block.line, block.reason) for block in found] == [
        ("sh", 4, ""),
        ("sh", 9, "needs a GPU"),
        ("sh", 15, ""),
        ("toml", 19, ""),
    ]
    assert found[2].text.startswith("make test\n")


def test_a_page_runs_in_order_outside_the_checkout(tmp_path: Path) -> None:
    ran = run_page(SAMPLE, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "one\n"
    assert (tmp_path / "made.txt").is_file() and not (ROOT / "made.txt").exists()
    assert "make" not in script(blocks(SAMPLE)) and "make test-lossless" in script(
        blocks("```sh\nmake test-lossless\n```")
    )


@pytest.mark.parametrize("failing", ["false", "eyas nonsense", "false | cat", 'echo "$unset_name"'])
def test_a_command_that_fails_is_caught(failing: str, tmp_path: Path) -> None:
    assert run_page(f"```sh\n{failing}\ntrue\n```\n", tmp_path).returncode != 0


@pytest.mark.parametrize("page", ["```sh\ntrue\n", "<!-- not run: -->\n```sh\ntrue\n```\n"])
def test_a_page_that_hides_something_is_refused(page: str) -> None:
    with pytest.raises(AssertionError, match="line 1"):
        blocks(page)
