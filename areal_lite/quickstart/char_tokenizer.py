"""A tokenizer with one token per printable ASCII character, for models trained from nothing.

Invariants:
  * for printable ASCII and newline, `encode(text, add_special_tokens=False)` has `len(text)` ids
    and decodes to exactly `text`. Any other character becomes `?`;
  * `<pad>` is id 0 and `<eos>` is id 1. Spelled out in a text, they are these tokens and not five
    characters;
  * ids never change, so saved models stay valid;
  * the chat template adds only `<eos>` after an assistant's message, so a user's message is its own
    prompt.
"""

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build_char_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer, 98 tokens; save it with `save_pretrained`."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    # BPE without merges splits text into characters and needs no pre-tokenizer.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )
