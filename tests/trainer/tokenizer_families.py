"""Small tokenizers built as those of well-known models, with their real control tokens and similar chat templates."""

import json
import textwrap
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = Path(textwrap.__file__).read_text(encoding="utf-8").splitlines(keepends=True)[:300]
BYTES = pre_tokenizers.ByteLevel.alphabet()

CHATML = (
    "{% for m in messages %}{% if m.content.startswith('<tool_response>') %}{{ '<tool_call>' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}'
    "{%- endif %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '<|eot_id|>' }}"
    "{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + "
    "'<|eot_id|>' }}{%- endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\\n' + m.content | trim + "
    "'<end_of_turn>\\n' }}{% endfor %}{{ '<start_of_turn>model\\n' }}"
)


def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token a byte, `<eos>` (0) and no chat template."""
    vocabulary = {token: number for number, token in enumerate(["<eos>", *sorted(BYTES)])}
    return _fast(_byte_level(models.BPE(vocab=vocabulary, merges=[])), ["<eos>"], eos_token="<eos>")


def qwen() -> PreTrainedTokenizerFast:
    """Return a tokenizer as that of Qwen: byte-level BPE, and control tokens of which some are not marked special."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    fast = _fast(_trained(_byte_level(models.BPE()), special), special, eos_token="<|im_end|>")
    fast.add_tokens([AddedToken(token, normalized=False) for token in ("<|fim_prefix|>", "<tool_call>", "<b>")])
    fast.chat_template = CHATML
    return fast


def llama_3() -> PreTrainedTokenizerFast:
    """Return a tokenizer as that of Llama 3.2, whose template asks for the date."""
    special = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = _trained(_byte_level(models.BPE()), special)
    _begin_with(tokenizer, "<|begin_of_text|>")
    fast = _fast(tokenizer, special, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    fast.chat_template = LLAMA_3
    return fast


def mistral() -> PreTrainedTokenizerFast:
    """Return a tokenizer as that of Mistral and Llama 2: BPE of pieces that begin with a visible space."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _trained(tokenizer, [*special, *(f"<0x{byte:02X}>" for byte in range(256))])
    _begin_with(tokenizer, "<s>")
    fast = _fast(tokenizer, special, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = MISTRAL
    return fast


def gemma() -> PreTrainedTokenizerFast:
    """Return a tokenizer as that of Gemma: control tokens beside added tokens that are ordinary text."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _trained(tokenizer, [*special, *(f"<0x{byte:02X}>" for byte in range(256))])
    _begin_with(tokenizer, "<bos>")
    fast = _fast(tokenizer, special, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>")
    fast.add_tokens([AddedToken(token, normalized=False) for token in ("\n\n", "<table>")])
    fast.chat_template = GEMMA
    return fast


def base_model() -> PreTrainedTokenizerFast:
    """Return a tokenizer as that of a base model: `<|endoftext|>` begins and ends texts, and there is no template."""
    tokenizer = _trained(_byte_level(models.BPE()), ["<|endoftext|>"])
    _begin_with(tokenizer, "<|endoftext|>")
    return _fast(tokenizer, ["<|endoftext|>"], bos_token="<|endoftext|>", eos_token="<|endoftext|>")


FAMILIES = {maker.__name__: maker for maker in (letters, qwen, llama_3, mistral, gemma, base_model)}


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _trained(tokenizer: Tokenizer, first: list[str]) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=len(first) + 700, special_tokens=first, initial_alphabet=BYTES, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _begin_with(tokenizer: Tokenizer, token: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))]
    )


def _fast(tokenizer: Tokenizer, special: list[str], **names: str) -> PreTrainedTokenizerFast:
    # The trainer gives byte tokens their place by taking them for special ones, which they are not.
    written = json.loads(tokenizer.to_str())
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] in special]
    plain = Tokenizer.from_str(json.dumps(written))
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, clean_up_tokenization_spaces=False, extra_special_tokens=special, **names
    )
