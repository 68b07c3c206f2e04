"""Text to token ids and back, for the byte-level BPE of the GLM-5 family.

Decisions:
* Nothing is added to a text and nothing is cut from it: the chat template writes every special
  token itself, so a token string in the text becomes that token.
* Streaming works on bytes. A byte-level token is a fixed byte string, so a token's text follows
  from those bytes and a UTF-8 decoder that keeps the bytes of an unfinished character, at a cost
  that does not depend on what came before.
* The tags of the chat format, such as `<think>`, are text, whatever the tokenizer marks: they say
  which part of an output is what, so leaving special tokens out leaves them in. Those that end a
  turn, such as `<|user|>`, are special tokens.
"""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel

from glm53.chat.tags import OUTPUT_TAGS


def _byte_of_char() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary entry stands for.

    Bytes that print in Latin-1 stand for themselves; the others follow from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(moved)
    }


_BYTE_OF_CHAR = _byte_of_char()


class Tokenizer:
    """A byte-level BPE tokenizer as Hugging Face checkpoints ship it; `from_dir` makes one."""

    def __init__(self, backend: tokenizers.Tokenizer, eos_token: str | None) -> None:
        """Wraps a loaded tokenizer.

        Args:
            backend: The tokenizer; its truncation and padding are switched off.
            eos_token: The token that ends a text, None if there is none.

        Raises:
            ValueError: The tokenizer is not byte-level, or does not know `eos_token`.
        """
        if not isinstance(backend.decoder, ByteLevel):
            raise ValueError(f"expected a ByteLevel decoder, got {backend.decoder}")
        if eos_token is not None and backend.token_to_id(eos_token) is None:
            raise ValueError(f"eos_token {eos_token!r} is not in the vocabulary")
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special and token.content not in OUTPUT_TAGS
        )
        self.eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Reads `tokenizer.json` and `tokenizer_config.json` of a checkpoint folder.

        Args:
            path: The folder.

        Raises:
            FileNotFoundError: One of the two files is missing.
            ValueError: One of them cannot be read, or they disagree on an added token's id. The
                message names the file.
        """
        tokenizer_file = Path(path) / "tokenizer.json"
        config_file = Path(path) / "tokenizer_config.json"
        for file in (tokenizer_file, config_file):
            if not file.is_file():
                raise FileNotFoundError(f"no such file: {file}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # The library raises no narrower type.
            raise ValueError(f"{tokenizer_file}: {error}") from error
        try:
            config = json.loads(config_file.read_text(encoding="utf-8"))
            added, eos_token = _read_config(config)
        except ValueError as error:
            raise ValueError(f"{config_file}: {error}") from error
        for token_id, token in added.items():
            if backend.token_to_id(token) != token_id:
                raise ValueError(
                    f"{config_file}: {token!r} has id {token_id}, but {backend.token_to_id(token)} "
                    f"in {tokenizer_file.name}"
                )
        try:
            return cls(backend, eos_token)
        except ValueError as error:
            raise ValueError(f"{tokenizer_file}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's padded vocabulary may be larger."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, in which strings of special tokens become those tokens.

        Raises:
            ValueError: The text has a lone surrogate, so it is no Unicode text.
        """
        text.encode()  # A UnicodeEncodeError names the place; the library says only "not a str".
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: Token ids; one outside the vocabulary, such as a padded one, stands for nothing.
            skip_special_tokens: Leave out the tokens marked as special, but for the tags of the
                chat format.
        """
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id not in self._special_ids]
        return self._backend.decode(ids, skip_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a vocabulary entry or added token, None if there is no such token."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """Returns the bytes of one token; see `decode` for the arguments."""
        token = self._backend.id_to_token(token_id)
        if token is None or (skip_special_tokens and token_id in self._special_ids):
            return b""
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # An added token, which is kept as plain text.
            return token.encode()


def _read_config(config: Any) -> tuple[dict[int, str], str | None]:
    """Returns the added tokens by id, and the end token, of a `tokenizer_config.json`."""
    if not isinstance(config, dict):
        raise ValueError(f"expected an object, got {type(config).__name__}")
    added = config.get("added_tokens_decoder", {})
    if not isinstance(added, dict):
        raise ValueError("added_tokens_decoder: expected an object")
    tokens = {}
    for token_id, token in added.items():
        if not token_id.isdecimal():
            raise ValueError(f"added_tokens_decoder: {token_id!r} is no token id")
        tokens[int(token_id)] = _token_text(token, f"added_tokens_decoder[{token_id!r}]")
    eos_token = config.get("eos_token")
    return tokens, None if eos_token is None else _token_text(eos_token, "eos_token")


def _token_text(token: Any, where: str) -> str:
    """Returns the text of a token given as a string or as an object with its `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected a string or an object with a content string")
    return text


class IncrementalDetokenizer:
    """Turns the ids of one output into text as they come, never emitting half a character.

    The pieces of `push`, then the piece of `flush`, joined equal `Tokenizer.decode` of all ids.
    After any push, the text so far is the decoding of the ids so far, less what an unfinished last
    character decodes to: U+FFFD, or two of them for the start of a surrogate, which is no valid
    character. After `flush` the object can take another output, of the same prompt.

    A prompt of ids may end within a character. An output that goes on with it has the whole
    character; of one that does not, the prompt's part is not in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        *,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """Starts with no ids.

        Args:
            tokenizer: The tokenizer.
            skip_special_tokens: As for `Tokenizer.decode`.
            prompt_ids: Token ids that the output follows.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._prompt_end = self._before = _unfinished_character(tokenizer, prompt_ids)

    def push(self, token_id: int) -> str:
        """Returns the text that the token completes, which may be empty."""
        data = self._tokenizer.token_bytes(token_id, self._skip_special_tokens)
        if self._before and data:
            if _is_continued(self._before, data):
                data = self._before + data
            self._before = b""
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Returns what is held back at the end: empty, or U+FFFD of an unfinished character."""
        self._before = self._prompt_end
        return self._utf8.decode(b"", final=True)


def decode_prompt(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    skip_special_tokens: bool = True,
) -> str:
    """Returns the text of a prompt, special tokens included, that an output's text follows.

    It is without the prompt's unfinished last character if the output goes on with that.

    Args:
        tokenizer: The tokenizer.
        prompt_ids: The prompt.
        output_ids: The output.
        skip_special_tokens: Whether the output's text is without special tokens.
    """
    end = _unfinished_character(tokenizer, prompt_ids)
    text = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    following = (tokenizer.token_bytes(token_id, skip_special_tokens) for token_id in output_ids)
    first = next((data for data in following if data), b"")
    if end and first and _is_continued(end, first):
        return text.removesuffix(end.decode(errors="replace"))
    return text


def _unfinished_character(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """Returns the bytes of the character that ids end within, empty if they end with one."""
    data = b""
    for token_id in reversed(ids):
        data = tokenizer.token_bytes(token_id, skip_special_tokens=False) + data
        if len(data) >= 4:
            break
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _is_continued(start: bytes, data: bytes) -> bool:
    """Returns whether bytes go on with the character that others start."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start + data[:1])
    except UnicodeDecodeError:
        return False
    return True
