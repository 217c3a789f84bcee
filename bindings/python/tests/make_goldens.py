"""Makes tests/data: a small tokenizer, and what Hugging Face transformers makes of the examples.

    python tests/make_goldens.py        (needs transformers and tokenizers)

The goldens let tests compare with transformers where it is not installed.
"""

from __future__ import annotations

import json
from pathlib import Path

import reference
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

DATA = Path(__file__).parent / "data"
SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]


def make_tokenizer() -> None:
    """A byte-level BPE of 400 tokens, trained on the examples, that begins texts with <|begin|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    lines = [
        line
        for name in ("chat", "completion", "text")
        for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
            ),
        ]
    )
    tokenizer.save(str(DATA / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": (DATA / "plain_template.jinja").read_text(encoding="utf-8").rstrip("\n"),
    }
    (DATA / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    make_tokenizer()
    tokenizer = reference.load(DATA)
    golden = {
        f"{name} {template} {train_on}": reference.encode_file(
            tokenizer, DATA / f"{name}.jsonl", template, train_on
        )
        for name, template, train_on in reference.CASES
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
    (DATA / "golden.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
