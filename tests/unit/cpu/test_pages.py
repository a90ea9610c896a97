"""Pages of the KV cache on a server without a GPU: SGLang's rules, without its Triton kernels."""

import subprocess
import sys

# SGLang decides at its import which platform it runs on, so this is a process of its own.
_PLAY = """
import random
import torch
from areal_lite.cpu.sglang.stand_ins import install_stand_ins
install_stand_ins()
import sglang
from areal_lite.cpu.sglang.attention import CpuPageAllocator

PAGES = 40


def slots_of_new(allocator, slots, new):
    '''Allocate new[i] tokens for each request of slots[i], by its slots before.'''
    before = torch.tensor([len(own) for own in slots])
    after = before + torch.tensor(new)
    last = torch.tensor([own[-1] if own else -1 for own in slots])
    if random.random() < 0.5 and set(new) == {1} and min(before) > 0:
        return allocator.alloc_decode(after, after, last)
    return allocator.alloc_extend(before, before, after, after, last, sum(new))


def play(seed, size, need_sort):
    random.seed(seed)
    allocator = CpuPageAllocator(PAGES * size, size, torch.float32, "cpu", None, need_sort)
    live, refused = {}, 0
    for turn in range(200):
        if live and random.random() < 0.2:
            own = live.pop(random.choice(list(live)))
            allocator.free(torch.tensor(own))
            continue
        names = random.sample(list(live), random.randint(0, len(live)))
        names += [f"{turn}-{i}" for i in range(random.randint(not names, 3))]
        longest = random.choice([1, 1, 3 * size])
        new = [random.randint(1, longest) for _ in names]
        slots = [live.get(name, []) for name in names]
        pages = [-(-(len(own) + n) // size) - -(-len(own) // size) for own, n in zip(slots, new)]
        free = allocator.available_size()
        given = slots_of_new(allocator, slots, new)
        if sum(pages) * size > free:
            assert given is None and allocator.available_size() == free
            refused += 1
            continue
        assert allocator.available_size() == free - sum(pages) * size
        given = given.tolist()
        for name, own, n in zip(names, slots, new):
            live[name] = own + given[:n]
            given = given[n:]
        assert not given
        taken = [slot for own in live.values() for slot in own]
        assert len(set(taken)) == len(taken)
        assert all(size <= slot < (PAGES + 1) * size for slot in taken)  # page 0 is SGLang's own
        for own in live.values():
            for position, slot in enumerate(own):
                assert slot % size == position % size
                assert position % size == 0 or slot == own[position - 1] + 1
    return refused


refused = [play(seed, size, need_sort)
           for seed in range(3) for size in (2, 4, 16) for need_sort in (False, True)]
assert all(refused)
print("played")
"""


def test_pages_are_whole_and_nobody_shares_one():
    run = subprocess.run([sys.executable, "-c", _PLAY], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["played"]
