"""``llmpq chat`` and ``llmpq run`` on the shipped model."""

import io
import json
import shutil
from pathlib import Path

import pytest

from llmpq.api import Pipeline, SamplingParams
from llmpq.cli.front import answers
from llmpq.cli.front.program import main
from llmpq.spec.plan import read_plan

pytest.importorskip("torch")
DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def talker(tmp_path):
    folder = tmp_path / "talker"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.dist
def test_run_prints_the_answer_of_the_pipeline(capsys, tmp_path):
    words = [
        str(DEMO),
        "-p",
        "To install",
        "--max_tokens",
        "9",
        "--max_model_len",
        "64",
        "--no_measure",
    ]
    assert main(["run", *words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    plan = read_plan(record["plan"])
    with Pipeline(plan, model=DEMO) as pipeline:
        (expected,) = pipeline.generate(["To install"], SamplingParams(max_tokens=9))
    assert record["text"] == expected.text
    assert (record["tokens"], record["finish_reason"]) == (9, "length")
    assert record["context"] == 64
    assert record["is_new_plan"]
    assert main(["run", *words]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected.text + "\n"
    assert "kept from before" in shown.err
    assert "[9 tokens" in shown.err


@pytest.mark.dist
def test_a_talk_keeps_its_messages_and_forgets_the_first_when_it_is_long(
    talker, capsys, monkeypatch
):
    prompts = []
    real = answers.show_answer

    def noted(pipeline, prompt, sampling, printer):
        prompts.append(prompt)
        return real(pipeline, prompt, sampling, printer)

    monkeypatch.setattr(answers, "show_answer", noted)
    lines = "Hello\n\nAnd now?\n" + "More words here please, and then some. \n" * 6 + "/exit\nno\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    words = [str(talker), "--max_tokens", "6", "--max_model_len", "120", "--system", "Be kind"]
    words.append("--no_measure")
    assert main(["chat", *words]) == 0
    shown = capsys.readouterr()
    assert len(prompts) == 8  # neither the empty line nor what follows /exit
    assert len(prompts[0]) < len(prompts[1]) < len(prompts[2])
    assert max(map(len, prompts)) <= 90  # what the answer leaves of the context
    assert "forgotten" in shown.err
    assert len(shown.out.splitlines()) >= 8


@pytest.mark.dist
def test_a_model_without_template_continues_texts(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("To install\n"))
    assert main(["chat", str(DEMO), "--max_tokens", "5", "--no_measure"]) == 0
    shown = capsys.readouterr()
    assert "no chat template" in shown.err
    assert "[5 tokens" in shown.err


class Interrupted:
    """A pipeline whose user types Ctrl-C after a token."""

    def stream(self, *_):
        yield answers_chunk("a")
        raise KeyboardInterrupt


def answers_chunk(text):
    from llmpq.api import OutputChunk  # noqa: PLC0415

    return OutputChunk(id=0, token_ids=(5,), text=text)


def test_ctrl_c_ends_an_answer_and_nothing_else(capsys):
    sampling = SamplingParams(max_tokens=4)
    shown = answers.show_answer(Interrupted(), "x", sampling, answers.Printer())
    assert (shown.text, shown.tokens, shown.finish_reason) == ("a", 1, "cancelled")
    assert "ended by cancelled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat", str(DEMO), "--json"], "expected llmpq run"),
        (["run", str(DEMO), "-p", ""], "empty text"),
        (["run", str(DEMO), "-p", "a", "--max_tokens", "0"], "--max_tokens: found 0"),
        (["run", "no/such", "-p", "a"], "no/such"),
    ],
)
def test_what_cannot_be_answered_is_one_line_of_error(words, message, capsys):
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
