"""A model's own tokenizer: tokenizer.json, or GPT-2's vocab.json and merges.txt, with the special
tokens and the chat template that lie beside it. Uses Hugging Face `tokenizers`, not `transformers`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, pre_tokenizers, processors

from .errors import PrepareError

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass
class ModelTokenizer:
    """A tokenizer with what templates need to know about it."""

    path: Path
    backend: Tokenizer
    named_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    sha256: str = ""

    @property
    def vocab_size(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def eos_id(self) -> int | None:
        eos = self.named_tokens.get("eos_token")
        return None if eos is None else self.backend.token_to_id(eos)

    @property
    def padding_id(self) -> int:
        """The pad token, else end of text, else token 0: padding is never trained on."""
        for name in ("pad_token", "eos_token"):
            token = self.named_tokens.get(name)
            if token is not None and (token_id := self.backend.token_to_id(token)) is not None:
                return int(token_id)
        return 0

    def encode(self, text: str, *, special: bool) -> Encoding:
        """`special`: with the tokens that the tokenizer itself puts around a text."""
        return self.backend.encode(text, add_special_tokens=special)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PrepareError(f"{path}: {error}; copy the tokenizer's files again") from error
    if not isinstance(content, dict):
        raise PrepareError(f"{path}: expected a JSON object; copy the tokenizer's files again")
    return content


def _gpt2_tokenizer(vocab: Path, merges: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _load_backend(path: Path) -> tuple[Tokenizer, Path]:
    """The tokenizer, and the file that it came from."""
    file = path if path.is_file() else path / "tokenizer.json"
    if file.is_file():
        try:
            return Tokenizer.from_file(str(file)), file
        except Exception as error:  # tokenizers raises bare Exception
            raise PrepareError(f"{file}: {error}; copy the tokenizer's files again") from error
    vocab, merges = path / "vocab.json", path / "merges.txt"
    if vocab.is_file() and merges.is_file():
        return _gpt2_tokenizer(vocab, merges), vocab
    if next(path.glob("*.model"), None) is not None:
        raise PrepareError(
            f"{path}: has a SentencePiece model but no tokenizer.json; convert it once with "
            f'transformers: AutoTokenizer.from_pretrained("{path}").save_pretrained("{path}")'
        )
    raise PrepareError(f"{path}: no tokenizer.json; give a model's directory or that file")


def _token_text(value: Any) -> str | None:
    """A special token is a string, or an object that describes an added token."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_tokens(tokenizer: Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Adds what the configuration names and tokenizer.json lacks, lowest number first."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    wanted: list[AddedToken] = []
    decoder = config.get("added_tokens_decoder") or {}
    for _, token in sorted(decoder.items(), key=lambda entry: int(entry[0])):
        fields = {k: v for k, v in token.items() if k != "content"}
        wanted.append(AddedToken(token["content"], **fields))
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens")) or []
    extra = extra.values() if isinstance(extra, dict) else extra
    for text in [*named.values(), *(_token_text(value) for value in extra)]:
        if text is not None:
            wanted.append(AddedToken(text, special=True, normalized=False))
    for token in wanted:
        if token.content not in known:
            known.add(token.content)
            tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens(
                [token]
            )


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def load_tokenizer(path: str | Path) -> ModelTokenizer:
    """From a model's directory, or a tokenizer.json whose configuration lies beside it."""
    path = Path(path)
    if not path.exists():
        raise PrepareError(f"{path}: no such file or directory; give the model's directory")
    backend, file = _load_backend(path)
    backend.no_truncation()
    backend.no_padding()
    # "name.json" has its configuration in "name_config.json", as tokenizer.json has.
    config_path = file.with_name(file.stem + "_config.json")
    config_path = file.with_name("tokenizer_config.json") if file.stem == "vocab" else config_path
    config = _read_json(config_path) if config_path.is_file() else {}
    if not config and file.stem == "vocab":
        config = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    special_path = file.with_name("special_tokens_map.json")
    special = _read_json(special_path) if special_path.is_file() else {}
    named = {}
    for name in NAMED_TOKENS:
        text = _token_text(config.get(name, special.get(name)))
        if text is not None:
            named[name] = text
    _add_tokens(backend, config, named)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return ModelTokenizer(path, backend, named, _chat_template(file.parent, config), digest)
