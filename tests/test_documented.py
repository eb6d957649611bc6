"""What README, CONTRIBUTING and the pages of docs/ show is run: Python, commands, `make` targets.

Comments in the source of a page, right before a block, say what a reader does not see:

    <!-- run here after: CODE -->                           Python that the block needs
    <!-- run here with: `A` as `B` -->                      the block, with B in the place of A
    <!-- not run here: `A` needs REASON; it says "TEXT" --> lines with A stop with this message, or "TEXT" or "TEXT"

Commands run in this process, in a temporary folder, with the options of SMALLER in the place of the line's own: each
once, however many pages show it. Models of SHALLOW have two blocks, and `--all` plans two studies.
"""

import ast
import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

from photos import class_folders
from regard import save
from regard.cli.app import run
from regard.lab.studies import STUDIES
from regard.lab.train.load import load_run
from regard.mixers.static_keys.ska import SKA
from regard.swapping.layer_plan import write_layer_plan
from streams import write_stream

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "regard"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

PLACEHOLDERS = {
    ".venv/bin/": "",
    "~/photos": "photos",
    "~/shards": "shards",
    "PATH": "photos",
    "/data": "data",
    "<Name>": "SKA",
    "regard train MECHANISM --task TASK --data DATA": "regard train SKA --task segmentation --data cued-digits",
    "regard card NAME": "regard card MiTA",
    "--model NAME": "--model vit_desk",
    "regard swap-check NAME": "regard swap-check vit_desk",
    "regard study show NAME": "regard study show quickstart",
    "regard probe all": "regard probe SKA",
    "regard maps MODEL IMAGE": "regard maps vit_desk flower",
}
SMALLER = {
    r"regard check": "--no-compile",
    r"regard bench (?!.*--model)": "--seconds 0.01 --grid 6x6 --dim 8",
    r"regard bench --grid .*--page": "SKA",
    r"regard bench .*--model": "--seconds 0.01 --batch 1 --size 96",
    r"regard advise (?!.*(?:--data|--tokens|--grid))": "--seconds 0.001 --batch 1 --size 32x32 --mixers SKA",
    r"regard advise .*--data": "--minutes 0.02 --images 16 --mixers None --budget macs=0.999x --out advised",
    r"regard swap-check .*--data": "--images 16",
    r"regard distill": "--steps 2 --output-steps 1 --images 16 --out learned",
    r"regard probe": "--scale smoke --seeds 1 --workers 0",
    r"regard probe (?!.*--sweep)": "--abilities content",
    r"regard (train|finetune)": "--set recipe.epochs=1",
    r"regard (train|finetune) (?!.*(stream:|hf://))": "--set task.limit=16",
    r"regard study show": "--no-estimate",
    r"regard study run (?!.*--decide).*--dry-run": "--rows w/o",
    r"regard study run (?!.*(--decide|--on |--dry-run))": "--seeds 1 --workers 0 --rows w/o",
    r"regard study run .*--on ": "--seeds 1 --rows w/o",
    r"regard study run (?!.*--decide).*--scale desk": "--scale smoke",
    r"regard study run .*--decide": "--workers 0 --hours 0.0000001",
}
SHALLOW = r"(?<=regard )((?:bench|cost|advise|swap-check|maps) .*\b(?:deit|vit)_\w+_patch16_224)(?![\w(.])"


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its fence in the page; comments: those right before it; prints: the command whose output
    it is, from a sentence that ends with "`command` prints:"."""

    page: Path
    line: int
    language: str
    text: str
    comments: tuple[str, ...]
    prints: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def lines(self) -> list[str]:
        """Commands, without comments."""
        return [line for text in self.text.splitlines() if (line := re.sub(r"\s+# .*", "", text))]

    @property
    def file(self) -> str:
        """The module that a Python block says it is, in its first line."""
        match = re.match(r'"""(\w+\.py): ', self.text)
        return match[1] if match else ""

    def missing(self) -> dict[str, tuple[str, str]]:
        """Text of a line that cannot be run here -> (reason, part of the message)."""
        pattern = r'not run here: `(.+)` needs (.+); it says "(.+)"'
        matches = (re.fullmatch(pattern, comment) for comment in self.comments)
        return {match[1]: (match[2], match[3]) for match in matches if match}

    def code(self) -> str:
        """Python as it is run here."""
        text = self.text
        for comment in self.comments:
            if match := re.fullmatch(r"run here with: `(.+)` as `(.+)`", comment):
                assert match[1] in text, f"{self}: nothing to replace"
                text = text.replace(match[1], match[2])
            elif match := re.fullmatch(r"run here after: (.+)", comment, re.DOTALL):
                text = f"{match[1]}\n{text}"
        return text


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page."""
    text = page.read_text()
    for match in re.finditer(r"((?:^<!-- [^\n]*? -->\n)*)^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start(2)) + 1
        comments = tuple(re.findall(r"<!-- (.*?) -->", match[1]))
        sentence = re.search(r"`([^`\n]+)` prints:\n\n\Z", text[: match.start()])
        yield Block(page, line, match[2], match[3], comments, sentence[1] if sentence else "")


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [block for block in BLOCKS if block.language == ""]
PYTHON = [page for page in PAGES if any(block.page == page and block.language == "python" for block in BLOCKS)]
SPANS = sorted({span for page in PAGES for span in re.findall(r"`((?:regard|make) [^`]+)`", page.read_text())})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of a run, photos in class folders, shards, clips, a plan, a saved model, and the
    modules that pages show."""
    root = tmp_path_factory.mktemp("documented")
    results = root / "results"
    options = ["--scale", "smoke", "--seeds", "1", "--workers", "0", "--rows", "Factors*", "--results", str(results)]
    assert run(["study", "run", "quickstart", *options]) == 0
    class_folders(root / "photos", images=8, width=48, height=40)
    write_stream(root / "shards", "tar")
    for name in ("jump", "wave"):
        class_folders(root / "my-clips" / name, [f"clip{number}" for number in range(4)], 8, width=48, height=40)
    (root / "data").mkdir()
    write_layer_plan({"blocks.0.attn": SKA()}, root / "advice" / "plan.json")
    (outcome,) = results.glob("*/outcome.json")
    save(load_run(outcome.parent), root / "distilled")
    for block in BLOCKS:
        if block.file:
            (root / block.file).write_text(block.text)
    return root


@pytest.fixture
def key(tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The key of the finished run; the current folder is a copy of what was made."""
    here = shutil.copytree(made, tmp_path / "here")
    for module in here.glob("*.py"):
        monkeypatch.delitem(sys.modules, module.stem, raising=False)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("REGARD_DATA", str(here / "data"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # not the cluster of another test
    monkeypatch.setattr("regard.cli.study_all.STUDIES", {name: STUDIES[name] for name in ("quickstart", "mita_table2")})
    return next(outcome.parent.name for outcome in here.glob("results/*/outcome.json"))


def smaller(line: str, key: str) -> list[str]:
    """A command as it is run here, without the word regard."""
    for text, replacement in {**PLACEHOLDERS, "RUN": key}.items():
        line = line.replace(text, replacement)
    options = [option for pattern, option in SMALLER.items() if re.match(pattern, line)]
    added = re.findall(r"--set [\w.]+=|--(?!set )[\w-]+", " ".join(options))
    for name in added:  # which would be given twice
        line = re.sub(rf" {re.escape(name)}(?:(?<==)| )?('[^']*'|[^ ]+)(?= |$)", "", line)
    line = re.sub(SHALLOW, r"\1(depth=2)", line)
    return shlex.split(" ".join([line, *options]))[1:]


def in_one_process(line: str) -> str:
    """The command that torchrun would start several times; its own options are checked by its parser."""
    options = torchrun_parser().parse_args(shlex.split(line)[1:])
    assert options.module
    return shlex.join([options.training_script, *options.training_script_args])


def run_line(line: str, key: str) -> int:
    """The exit code of one line. Raises: AssertionError for a line that is none of regard, make and torchrun."""
    program = line.removeprefix(".venv/bin/").partition(" ")[0]
    assert program in ("regard", "make", "torchrun"), f"{line!r} has no handler here"
    if program == "torchrun":
        return run(smaller(in_one_process(line), key))
    if program == "make":
        command = ["make", "-n", f"PYTHON={sys.executable}", *shlex.split(line)[1:]]  # which it looks for else
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode
    return run(smaller(line, key))


def cases() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(place, line, what it says if it cannot run here) of each command; inside a sentence, a verb alone is a name, and
    its help is shown."""
    for block in COMMANDS:
        for line in block.lines:
            yield str(block), line, tuple(message for text, (_, message) in block.missing().items() if text in line)
    for span in SPANS:
        alone = re.fullmatch(r"regard( study)? [\w-]+", span)
        yield "sentence", f"{span} --help" if alone else span.replace("...", ""), ()


def as_run(line: str) -> tuple[str, ...]:
    """What tells one command from another."""
    return tuple(smaller(line, "RUN")) if re.match(r"(\.venv/bin/)?regard ", line) else (line,)


CASES = {(as_run(line), messages): (place, line) for place, line, messages in reversed([*cases()])}


@pytest.mark.parametrize(
    ("line", "messages"),
    [pytest.param(line, case[1], id=f"{place}: {line}") for case, (place, line) in reversed(CASES.items())],
)
def test_a_command_runs(line: str, messages: tuple[str, ...], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_line(line, key)
    errors = capsys.readouterr().err
    assert (code == 0) == (not messages), f"{line}\n{errors}"
    assert all(any(text in errors for text in message.split('" or "')) for message in messages), errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_all_studies_are_planned(tmp_path: Path) -> None:
    words = ["--scale", "desk", "--decide", "--workers", "0", "--hours", "0.0000001", "--results", str(tmp_path)]
    assert run(["study", "run", "--all", *words]) == 0


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_python_runs_and_prints_what_is_written(page: Path, key: str) -> None:
    """The blocks of a page share their names. `print(x)  # True` must print True."""
    names: dict[str, object] = {"__name__": page.stem}
    for block in BLOCKS:
        if block.page == page and block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(block.code(), str(block), "exec"), names)
            output = printed.getvalue().replace("torch.Size([", "(").replace("])", ")")
            for value in promised(block.text):
                assert value in output.splitlines(), f"{block}: {value} is not printed"


def promised(code: str) -> Iterator[str]:
    """The values in the comments behind `print(...)`."""
    for comment in re.findall(r"^print\(.*\)  # ([^:\n]+)", code, re.MULTILINE):
        with contextlib.suppress(ValueError, SyntaxError):
            yield str(ast.literal_eval(comment))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.prints], ids=str)
def test_a_command_prints_what_is_shown(block: Block, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shlex.split(block.prints)[1:]) == 0
    assert trimmed(capsys.readouterr().out) == trimmed(block.text)


def trimmed(text: str) -> list[str]:
    """Lines without what is blank."""
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "text" and not block.prints], ids=str)
def test_a_drawing_names_what_exists(block: Block) -> None:
    """The tree of folders and the order of the layers."""
    pattern = r"\w+" if "<-" in block.text else r"^ +([\w.]+)/?"
    names = re.findall(pattern, block.text, re.MULTILINE)
    assert names
    assert [name for name in names if not any(SOURCE.rglob(name)) and not any(SOURCE.rglob(f"{name}.py"))] == []


def test_every_block_has_a_handler(capsys: pytest.CaptureFixture[str]) -> None:
    assert {block.language for block in BLOCKS} <= {"", "python", "text"}
    comments = sum(page.read_text().count("run here") for page in PAGES)
    assert comments == sum(len(block.comments) for block in BLOCKS), "a comment does not stand right before a block"
    for block in BLOCKS:
        for text in block.missing():
            assert any(text in line for line in block.lines), f"{block}: a comment names {text}, which no line has"
    reasons = [reason for block in BLOCKS for reason, _ in block.missing().values()]
    lines = sum(len(block.lines) for block in COMMANDS)
    with capsys.disabled():
        print(f"\n{lines} documented commands, {len(reasons)} not run here: they need {'; '.join(reasons)}")
