"""The documentation cannot rot: its commands are run, the reference is compared with --help, links lead somewhere.

How a command in a page is checked:
- docs/tutorial.md: every ```sh and ```python block is run, in order, in an empty folder. `sattle` commands run in this
  process (each start would cost seconds); everything else in bash.
- README.md: `make demo` is run as it is, the Python and the `sattle` commands of its code blocks are run in order, in a
  folder that has the files they name, with training cut short (QUICK). The spellings of torchrun: test_launch.py.
- Not run, as each takes minutes, another machine or a network, but held to what exists: other `make TARGET` (the target
  must be in the Makefile), `torchrun ... launchers/train.py OPTIONS` (the script must exist, the options be those of
  `sattle train`), `python -m benchmarks.X` (the module must exist), `pip install .[EXTRA]` (the extra must exist).
- The other pages: their `sattle` commands must name existing commands and options.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ingest.cli import ingest
from sattle_dist.cli import main

ROOT = Path(__file__).parent.parent.parent
SHORT = ["--epochs", "2", "--dim", "8", "--num-heads", "2", "--dim-hidden", "16", "--threads", "1", "--eval-every", "1"]
QUICK = {"train": SHORT, "plan": ["--device-flops", "1e12", "--device-memory", "8GB"]}  # given, not measured
OURS = ("sattle", "sattle-ingest")
NOT_RUN = (
    "make",
    "torchrun",
    "python",
    "pip",
    "sbatch",
    "kubectl",
    "docker",
    "cd",
    "git",
    "zcat",
    "tensorboard",
    "export",
)


def test_the_reference_is_what_help_says() -> None:
    # In a process of its own: click keeps a command's help option as it was first asked for.
    code = f"import runpy; print(runpy.run_path({str(ROOT / 'docs' / 'reference.py')!r})['reference'](), end='')"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == made, "run `make docs`"


def run_ours(words: list[str]) -> str:
    """Run a `sattle` or `sattle-ingest` command in this process; give what it printed."""
    command = ingest if words[0] == "sattle-ingest" else main
    done = CliRunner().invoke(command, words[1:])
    assert done.exit_code == 0, f"{shlex.join(words)}: {done.output} {done.exception!r}"
    return done.stdout


def test_the_tutorial_works_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    assert [kind for kind, _ in blocks].count("sh") >= 6
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = ""
    for kind, text in blocks:
        assert kind in ("sh", "python"), f"say how a block of {kind} is to be checked"
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(text, {})
            printed += out.getvalue()
            continue
        while text:
            line, _, rest = text.partition("\n")
            if line.startswith(OURS):
                printed += run_ours(shlex.split(line))
                text = rest
                continue
            end = re.search(r"^(?=sattle)", text, re.MULTILINE)  # other commands, up to the next of ours
            part, text = (text[: end.start()], text[end.start() :]) if end else (text, "")
            environ = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                ["bash", "-ec", part], env=environ, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, f"{part}: {done.stderr}"
            printed += done.stdout
    assert {"facts.tsv", "facts.graph", "runs", "answers.parquet", "vectors"} <= set(os.listdir())
    mrr = float(re.findall(r"^  MRR +(\d\.\d+)$", printed, re.MULTILINE)[0])
    assert mrr > 0.7
    assert re.search(r"_miller .* test$", printed, re.MULTILINE), "no held-out fact among the answers"
    assert Path("runs/facts/report.html").stat().st_size > 10_000
    assert "(1, 64)" in printed


def commands(page: Path) -> Iterator[list[str]]:
    """Give the words of every command in a page's code blocks, joined over line ends, without comments."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:sh|bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks += ["\n".join(re.findall(r"^    (.*)$", text, re.MULTILINE))]
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ")
            with contextlib.suppress(ValueError):  # an apostrophe in a line of output
                words = shlex.split(line, comments=True)
                if words and words[0] in OURS + NOT_RUN:
                    yield words


def check_options(words: list[str]) -> None:
    """Hold a `sattle` command to the commands and options there are."""
    command: click.Command | None = ingest
    arguments = words[1:]
    if words[0] == "sattle":
        command = main.get_command(click.Context(main), words[1]) if not words[1].startswith("-") else main
        assert command is not None, f"{shlex.join(words)}: there is no such command"
        arguments = words[2:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in arguments:
        if word.startswith("--"):
            assert word.split("=")[0] in known | {"--help", "--version"}, f"{shlex.join(words)}: no option {word}"


def check_not_run(words: list[str]) -> None:
    """Hold a command that is not run to what there is."""
    text = shlex.join(words)
    if words[0] == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert set(words[1:]) <= targets, f"{text}: no such target"
    if words[0] == "torchrun":
        place = next(i for i, word in enumerate(words) if word.endswith(".py"))
        assert (ROOT / words[place]).is_file(), f"{text}: no such script"
        name = Path(words[place]).stem
        check_options(["sattle", name, *words[place + 1 :]])
    if words[0] == "python" and "-m" in words:
        module = words[words.index("-m") + 1]
        if module.split(".")[0] in ("benchmarks", "ingest", "sattle_dist"):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), f"{text}: no such module"
    if words[0] == "pip" and (extras := re.findall(r"\[([\w,]+)\]", text)):
        known = (ROOT / "pyproject.toml").read_text()
        assert all(f"\n{extra} = [" in known for extra in extras[0].split(",")), f"{text}: no such extra"


def test_the_commands_of_the_readme_work(families_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/demo").symlink_to(families_run / "run")
    names = ["SOME_ENTITY", *(f"entity_{i}" for i in range(30))]
    triples = [(names[i % 31], "SOME_RELATION", names[(7 * i + 1) % 31]) for i in range(31)]
    triples += [(names[i % 31], "other", names[(5 * i + 2) % 31]) for i in range(31)]
    Path("triples.tsv").write_text("".join("\t".join(triple) + "\n" for triple in triples), encoding="utf-8")
    Path("queries.tsv").write_text("SOME_ENTITY\tSOME_RELATION\t?\n", encoding="utf-8")
    ran = 0
    for words in commands(ROOT / "README.md"):
        if words[0] not in OURS:
            check_not_run(words)
            continue
        run_ours(words + QUICK.get(words[1], []))
        ran += 1
    assert ran >= 6
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(block, {})


def test_make_demo(tmp_path: Path) -> None:
    """In a folder that has the project's files: the demo as a user starts it, four processes and all epochs."""
    environment = Path(sys.prefix)
    if not (environment / ".installed").exists():
        pytest.skip(f"{environment} was not made by `make install`, which `make demo` would begin with")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "launchers"):
        (tmp_path / name).symlink_to(ROOT / name)
    environ = {**os.environ, "SATTLE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        ["make", "demo", f"VENV={environment}"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pip install" not in done.stdout
    assert float(re.findall(r"^  MRR +(\d\.\d+)$", done.stdout, re.MULTILINE)[0]) > 0.9
    answers = done.stdout.split("sattle predict runs/demo")[1:]
    assert len(answers) == 2
    assert all(re.search(r" test$", answer, re.MULTILINE) for answer in answers), "no held-out fact among the answers"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_the_commands_of_other_pages_exist(page: Path) -> None:
    for words in commands(page):
        check_options(words) if words[0] in OURS else check_not_run(words)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
