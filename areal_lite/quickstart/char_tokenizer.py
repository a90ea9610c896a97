"""A tokenizer of one token per printable ASCII character: the vocabulary of models trained from nothing.

Contract and invariants:
  * For printable ASCII and newline, `encode(text, add_special_tokens=False)` has `len(text)` ids and decodes to
    exactly `text`: no merges, no normalisation, no spaces added or cleaned up. Any other character becomes `?`.
  * `<pad>` is id 0 and `<eos>` is id 1; spelt out in a text they are those tokens, not five characters.
  * Ids never change between calls or versions of this file: models saved with them stay valid.
  * The chat template adds nothing but `<eos>` after an assistant's message, so a user message is its own prompt.
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
    """The tokenizer, 98 tokens; save it with `save_pretrained`, load it again with `AutoTokenizer`."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    # BPE without merges is the one model that splits text into characters with no pre-tokenizer to get in the way.
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
