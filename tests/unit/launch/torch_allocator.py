"""A double of torch's caching allocator, and the tensors of a training step for it.

The rules are those of c10/cuda/CUDACachingAllocator.cpp. Sizes are multiples of 512 bytes. Tensors
up to 1 MiB share segments of 2 MiB, and those below 10 MiB share segments of 20 MiB. Larger ones
get segments of their own, in multiples of 2 MiB. The smallest free block that fits is taken and
split. Free neighbors are joined. Segments stay.
"""

from dataclasses import dataclass

MIB = 2**20


@dataclass(eq=False)
class Block:
    size: int
    large: bool
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class Allocator:
    """The memory that torch holds, `reserved`, after some allocations; all in bytes."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: list[Block] = []

    def take(self, size: float) -> Block:
        size = max(-(-int(size) // 512) * 512, 512)
        large = size > MIB
        fitting = [b for b in self._free if b.large == large and b.size >= size]
        if fitting:
            block = min(fitting, key=lambda b: b.size)
            self._free.remove(block)
            block.free = False
        else:
            block = Block(_segment(size), large)
            self.reserved += block.size
        rest = block.size - size
        if rest >= 512 if not large else rest > MIB:
            tail = Block(rest, large, True, block, block.after)
            if block.after:
                block.after.before = tail
            block.size, block.after = size, tail
            self._free.append(tail)
        return block

    def give(self, block: Block) -> None:
        for other in (block.before, block.after):
            if other and other.free:
                self._free.remove(other)
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if block.before:
                        block.before.after = block
                else:
                    block.after = other.after
                    if block.after:
                        block.after.before = block
        block.free = True
        self._free.append(block)


def _segment(size: int) -> int:
    if size <= MIB:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB


def training_step(parameters: list[int], hf, tokens: int, recompute: bool) -> int:
    """Return the bytes that torch holds after two steps of one rank in bfloat16.

    Args:
        parameters: elements of each parameter.
        hf: a Hugging Face configuration of a dense model.
        tokens: tokens of the microbatch.
        recompute: whether layers keep their input only.
    """
    torch = Allocator()
    for size in parameters:
        torch.take(2 * size)  # weights
    torch.take(4 * sum(parameters))  # the gradient buffer
    for size in [*parameters] * 3:
        torch.take(4 * size)  # masters and two moments
    hidden, inner = hf.hidden_size, hf.intermediate_size
    dim = getattr(hf, "head_dim", None) or hidden // hf.num_attention_heads
    queries, keys = hf.num_attention_heads * dim, hf.num_key_value_heads * dim
    normed = [queries, keys] if hf.model_type == "qwen3" else []
    # Input, norm, QKV, head norms, rotated queries and keys, values, output; norm, MLP.
    widths = [hidden, hidden, queries + 2 * keys, *normed, queries, keys, keys, queries]
    widths += [hidden, hidden, 2 * inner, inner]

    def layer() -> list[Block]:
        kept = []
        for width in widths:
            temporary = torch.take(2 * tokens * width)
            kept.append(torch.take(2 * tokens * width))
            torch.give(temporary)
        return kept

    def backward(kept: list[Block]) -> None:
        grads = []
        while kept:
            grads.append(torch.take(2 * tokens * widths[len(kept) - 1]))
            torch.give(kept.pop())
            if len(grads) > 2:
                torch.give(grads.pop(0))
        for grad in grads:
            torch.give(grad)

    for _ in range(2):
        layers = []
        for _ in range(hf.num_hidden_layers):
            kept = layer()
            if recompute:
                for block in kept[1:]:
                    torch.give(block)
                kept = kept[:1]
            layers.append(kept)
        logits = [torch.take(4 * min(tokens, 1024) * hf.vocab_size) for _ in range(3)]
        for block in logits:
            torch.give(block)
        while layers:
            kept = layers.pop()
            if recompute:
                torch.give(kept[0])
                kept = layer()
            backward(kept)
    return torch.reserved
