"""Records of the usual instruction data sets, as conversations, completions or texts.

Formats: `messages` (OpenAI), `conversations` (ShareGPT), alpaca (`instruction`, `input`, `output`,
also with `instances`), completion (a prompt and a completion field), and `text`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import PrepareError, at

FORMATS = ("messages", "sharegpt", "alpaca", "completion", "text")
COMPLETION_FIELDS = (("prompt", "completion"), ("question", "answer"), ("prompt", "response"))
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


@dataclass
class Example:
    """One document to be: a conversation, or a prompt with its completion, or a text."""

    where: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    prompt: str = ""
    completion: str = ""
    text: str = ""

    @property
    def kind(self) -> str:
        return "chat" if self.messages else "completion" if self.completion else "text"


@dataclass(frozen=True)
class RecordOptions:
    """How records are to be understood; None finds it out from the fields of each record."""

    format: str | None = None
    prompt_field: str | None = None
    completion_field: str | None = None
    text_field: str = "text"
    as_chat: bool = False


def _string(where: str, name: str, value: Any, fix: str = "give a string") -> str:
    if not isinstance(value, str):
        raise at(where, name, f"{type(value).__name__} where a string is expected", fix)
    return value


def _list(where: str, record: dict[str, Any], name: str) -> list[Any]:
    value = record.get(name)
    if not isinstance(value, list) or not value:
        raise at(where, name, "missing, empty or no list", "give a list of messages")
    return value


def _tool_call(where: str, name: str, value: Any) -> dict[str, Any]:
    """A call as an object or its JSON, with or without the OpenAI wrapping."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise at(where, name, f"not JSON ({error})", "give {name, arguments}") from error
    if not isinstance(value, dict):
        raise at(where, name, "no object", "give {name, arguments}")
    function = value.get("function", value)
    return {"type": "function", "function": function}


def _parts(where: str, name: str, parts: list[Any], message: dict[str, Any]) -> None:
    """Content given as a list: text, reasoning and tool calls go to the fields templates read."""
    texts: list[str] = []
    calls = list(message.get("tool_calls") or [])
    for index, part in enumerate(parts):
        place = f"{name}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "reasoning", "tool_call", "tool_calls"):
            raise at(
                where,
                place,
                f"type {kind!r}",
                "only text, reasoning and tool_call are supported; remove the part",
            )
        value = part.get("value", part.get("text", part.get("content")))
        if kind == "text":
            texts.append(_string(where, place, value))
        elif kind == "reasoning":
            message["reasoning_content"] = _string(where, place, value)
        else:
            calls.append(_tool_call(where, place, value))
    message["content"] = "".join(texts)
    if calls:
        message["tool_calls"] = calls


def _message(where: str, name: str, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise at(where, name, "no object", 'give {"role": ..., "content": ...}')
    message = {key: value for key, value in raw.items() if value is not None}
    role = _string(where, f"{name}.role", message.get("role"), "give user, assistant or system")
    if role == "developer":
        message["role"] = "system"
    content = message.get("content")
    if isinstance(content, list):
        _parts(where, f"{name}.content", content, message)
    elif content is not None or not message.get("tool_calls"):
        _string(where, f"{name}.content", content)
    reasoning = next((message[k] for k in REASONING_FIELDS if k in message), None)
    if reasoning is not None:  # the older names of the same field
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _tools(where: str, record: dict[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise at(where, "tools", f"not JSON ({error})", "give a list of tools") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise at(where, "tools", "no list", "give a list of tools")
    return tools


def _need_assistant(where: str, name: str, messages: list[dict[str, Any]]) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise at(where, name, "no assistant message", "remove the record: nothing to learn from it")


def _from_messages(where: str, record: dict[str, Any]) -> list[Example]:
    raw = _list(where, record, "messages")
    messages = [_message(where, f"messages[{i}]", m) for i, m in enumerate(raw)]
    _need_assistant(where, "messages", messages)
    return [Example(where, messages=messages, tools=_tools(where, record))]


def _sharegpt_message(where: str, name: str, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise at(where, name, "no object", 'give {"from": ..., "value": ...}')
    sender = raw.get("from", raw.get("role"))
    role = ROLES.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise at(where, f"{name}.from", f"{sender!r}", f"give one of {', '.join(sorted(ROLES))}")
    value = _string(where, f"{name}.value", raw.get("value", raw.get("content")))
    if role == "function_call":
        calls = [_tool_call(where, f"{name}.value", value)]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    return {"role": role, "content": value}


def _from_sharegpt(where: str, record: dict[str, Any]) -> list[Example]:
    raw = _list(where, record, "conversations")
    messages = [_sharegpt_message(where, f"conversations[{i}]", m) for i, m in enumerate(raw)]
    system = record.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    _need_assistant(where, "conversations", messages)
    return [Example(where, messages=messages, tools=_tools(where, record))]


def _user_message(instruction: str, given: str) -> dict[str, Any]:
    """Templates that know no input see it after the instruction."""
    content = f"{instruction}\n\n{given}" if given else instruction
    return {"role": "user", "content": content, "instruction": instruction, "input": given}


def _from_alpaca(where: str, record: dict[str, Any]) -> list[Example]:
    instruction = _string(where, "instruction", record.get("instruction"))
    if "instances" not in record:
        instances = [("", record)]
    else:
        listed = _list(where, record, "instances")
        instances = [(f"instances[{i}].", entry) for i, entry in enumerate(listed)]
    history: list[dict[str, Any]] = []
    if isinstance(record.get("system"), str) and record["system"]:
        history.append({"role": "system", "content": record["system"]})
    for turn in record.get("history") or []:
        history.append({"role": "user", "content": _string(where, "history", turn[0])})
        history.append({"role": "assistant", "content": _string(where, "history", turn[1])})
    examples = []
    for name, entry in instances:
        given = _string(where, f"{name}input", entry.get("input") or "")
        output = _string(where, f"{name}output", entry.get("output"))
        user = _user_message(instruction, given)
        examples.append(
            Example(where, messages=[*history, user, {"role": "assistant", "content": output}])
        )
    return examples


def _completion_fields(record: dict[str, Any], options: RecordOptions) -> tuple[str, str] | None:
    if options.prompt_field and options.completion_field:
        return options.prompt_field, options.completion_field
    return next((pair for pair in COMPLETION_FIELDS if all(f in record for f in pair)), None)


def _from_completion(where: str, record: dict[str, Any], options: RecordOptions) -> list[Example]:
    fields = _completion_fields(record, options)
    if fields is None:
        raise at(
            where,
            "",
            f"no prompt and completion among the fields {', '.join(record)}",
            "name them with --prompt-field and --completion-field",
        )
    prompt, completion = (_string(where, name, record.get(name)) for name in fields)
    if not completion:
        raise at(where, fields[1], "empty", "remove the record: nothing to learn from it")
    if options.as_chat:
        answer = {"role": "assistant", "content": completion}
        return [Example(where, messages=[{"role": "user", "content": prompt}, answer])]
    return [Example(where, prompt=prompt, completion=completion)]


def _detect(where: str, record: dict[str, Any], options: RecordOptions) -> str:
    if "messages" in record:
        return "messages"
    if "conversations" in record:
        return "sharegpt"
    if "instruction" in record and ("output" in record or "instances" in record):
        return "alpaca"
    if _completion_fields(record, options) is not None:
        return "completion"
    if options.text_field in record:
        return "text"
    raise at(
        where,
        "",
        f"unknown kind of record with the fields {', '.join(record) or '(none)'}",
        "give --format, or name the fields with --prompt-field and --completion-field",
    )


def parse_record(where: str, record: Any, options: RecordOptions) -> list[Example]:
    """The examples of one record; most have one."""
    if not isinstance(record, dict):
        raise at(
            where,
            "",
            f"{type(record).__name__} where an object is expected",
            "give one JSON object a line, or a list of them",
        )
    kind = options.format or _detect(where, record, options)
    if kind == "messages":
        return _from_messages(where, record)
    if kind == "sharegpt":
        return _from_sharegpt(where, record)
    if kind == "alpaca":
        return _from_alpaca(where, record)
    if kind == "completion":
        return _from_completion(where, record, options)
    text = _string(where, options.text_field, record.get(options.text_field))
    return [Example(where, text=text)]


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PrepareError(
            f"{path}: byte {error.start} is not UTF-8; convert the file with iconv"
        ) from error
    except OSError as error:
        raise PrepareError(f"{path}: {error.strerror}; check the path") from error


def read_raw(path: Path, separator: str | None = None) -> Iterator[tuple[str, Any, int]]:
    """(place, JSON text or object or plain text, bytes of input) of each record of a file.

    Lines of .jsonl files are not parsed yet, so that other processes can do it. A text file is one
    document, or several where `separator` stands between them.
    """
    kind = path.suffix.lower()
    if kind in (".jsonl", ".ndjson"):
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}:{number}", line, len(line)
        except OSError as error:
            raise PrepareError(f"{path}: {error.strerror}; check the path") from error
    elif kind == ".json":
        text = _read_text(path)
        try:
            content = json.loads(text)
        except ValueError as error:
            raise PrepareError(
                f"{path}: not JSON ({error}); correct it, or name it .jsonl if each line is one"
            ) from error
        records = content if isinstance(content, list) else [content]
        for index, record in enumerate(records):
            yield f"{path}[{index}]", record, len(text) // max(1, len(records))
    else:
        text = _read_text(path)
        for index, part in enumerate(text.split(separator) if separator else [text]):
            if part.strip():
                yield f"{path}, document {index + 1}", part, len(part.encode())


def examples_of(where: str, raw: Any, options: RecordOptions) -> list[Example]:
    """The examples of what `read_raw` gave."""
    if isinstance(raw, str):
        return [Example(where, text=raw)]
    if isinstance(raw, bytes):
        try:
            raw = json.loads(raw)
        except ValueError as error:
            raise PrepareError(
                f"{where}: not JSON ({error}); correct or remove the line"
            ) from error
    return parse_record(where, raw, options)
