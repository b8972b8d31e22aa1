"""interlace generate: turns from the command line; runs and exported folders answer alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.cli import main, parser
from interlace.data.chats.encoding.tokens import TokenizerFormat
from interlace.train.commands.generate import turns_of


def test_media_and_texts_keep_their_order() -> None:
    given = (
        parser().parse_args("generate run --image a.png --text x --text y --audio b.wav --video c.mp4".split()).given
    )
    assert given == [("image", "a.png"), ("text", "x"), ("text", "y"), ("audio", "b.wav"), ("video", "c.mp4")]


def test_each_text_ends_a_turn() -> None:
    first = [("image", "a"), ("image", "b"), ("text", "x")]
    assert turns_of([*first, ("text", "y"), ("audio", "c")]) == [first, [("text", "y")], [("audio", "c")]]
    assert turns_of([]) == turns_of([("text", "")]) == []


def test_options_are_those_of_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    from interlace.modalities import register, unregister
    from tests.modalities.point_cloud import PointCloud

    register(PointCloud())
    try:
        with pytest.raises(SystemExit):
            main(["generate", "--help"])
    finally:
        unregister(PointCloud.name)
    assert "--cloud FILE" in (output := capsys.readouterr().out) and ".npy" in output


def test_a_run_and_its_export_answer_alike(
    own: Path, in_process: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", str(own / "own.toml"), "--set=log.samples=0"]) == 0, capfd.readouterr().err
    run, exported = own / "runs" / "own" / "latest", own / "exported"
    assert main(["export", str(run), str(exported)]) == 0
    asked = ["--image", str(own / "pictures" / "0.png"), "--text", "What?", "--text", "And now?"]
    prompts: list[str] = []
    encode = TokenizerFormat.encode_prompt

    def kept(self: TokenizerFormat, *given: object) -> object:
        chat, encoded = encode(self, *given)  # type: ignore[arg-type]
        prompts.append(self.decode(encoded.ids, skip_special=False))
        return chat, encoded

    monkeypatch.setattr(TokenizerFormat, "encode_prompt", kept)
    answers = []
    for model in (run, exported):  # the folder keeps data.max_image_tokens of the run
        capfd.readouterr()
        assert main(["generate", str(model), *asked, "--max-new-tokens", "3"]) == 0, capfd.readouterr().err
        answers.append(capfd.readouterr().out)
    assert answers[0] == answers[1]
    last = prompts[-1]
    assert last == prompts[-3] and "What?" in last and last.index("What?") < last.index("And now?")
    for arguments, message in ((["--raw"], "--raw: "), (["--step", "1"], "--step 1: "), ([], "nothing to answer")):
        text = ["--text", "a"] if arguments else []
        assert main(["generate", str(exported), *text, *arguments]) == 2
        assert message in capfd.readouterr().err
    for tokens, why in (([], "the model ended it at once"), ([257], "its 1 tokens have no text")):
        monkeypatch.setattr("interlace.train.report.answers.answer", lambda *_, tokens=tokens, **__: [tokens])
        monkeypatch.setattr("tokenizers.Tokenizer.decode", lambda *_, **__: "", raising=False)
        assert main(["generate", str(exported), "--text", "a"]) == 0
        out, err = capfd.readouterr()
        assert out == "\n" and f"interlace: the answer is empty: {why}" in err
