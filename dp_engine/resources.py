"""What a sequence holds at a rank: its row in the ledgers, KV blocks, a state slot. Taken and given back only here."""

import numpy as np

from dp_engine.blocks import NULL_BLOCK, Admission, BlockPool
from dp_engine.config import EngineConfig
from dp_engine.ledger import Ledgers
from dp_engine.prefix import extend_keys, root_key
from dp_engine.sequence import Sequence

_NO_BLOCKS = np.zeros(0, np.int32)
_NO_COPIES = np.zeros((0, 2), np.int64)


class Resources:
    """Owns pool, state slots and ledgers. Blocks and slot are always given together; a sequence has both or neither.

    hit_tokens, queried_tokens: cumulative figures of the prefix cache.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.slots = None if config.num_state_slots is None else BlockPool(config.num_state_slots)
        longest = max_model_len + 2 * (
            1 + config.num_draft_tokens
        )  # in flight and planned, where drafts are not clipped
        self.ledgers = Ledgers(config.max_num_seqs + 1, longest, config.block_size)
        self.hit_tokens = 0
        self.queried_tokens = 0
        self._hits_taken = 0
        self._block_size = config.block_size
        self._whole_length = config.admission == "full"
        self._prefix_cache = config.prefix_cache
        self._generation = 0
        self._withheld = _NO_BLOCKS
        self._block_copies: list[tuple[int, int]] = []
        self._state_copies: list[tuple[int, int]] = []
        # (blocks, slots) that copies read: those of copies not issued yet, and those of the step in flight.
        self._sources: list[tuple[np.ndarray, np.ndarray]] = []
        self._sources_in_flight: list[tuple[np.ndarray, np.ndarray]] = []

    # ---- admission

    def blocks_of_length(self, length: int) -> int:
        return -(-length // self._block_size)

    def blocks_for_start(self, seq: Sequence, margin: int = 0) -> int:
        """Blocks to have when `seq` starts: for its present length and `margin` tokens, or for its whole length."""
        length = seq.stop_len if self._whole_length else min(self.length(seq) + margin, seq.stop_len)
        return self.blocks_of_length(length)

    def can_start(self, seq: Sequence, margin: int = 0) -> Admission:
        """Can a sequence that holds nothing of its own yet get its blocks and slot?"""
        needed = self.blocks_for_start(seq, margin)
        admission = self.pool.can_allocate(needed)
        if admission is Admission.NEVER:
            return admission
        if seq.forked:  # has its slot already
            return self.pool.can_allocate(needed - int(self.ledgers.num_tokens[seq.row]) // self._block_size)
        if self.slots is not None and not self.slots.num_free:
            return Admission.LATER
        if admission is Admission.LATER:
            hits = self.match(seq)  # those in use cost no free block
            return self.pool.can_allocate(needed - len(hits) + self.pool.num_free_among(hits))
        return admission

    def length(self, seq: Sequence) -> int:
        """Committed tokens."""
        return int(self.ledgers.length[seq.row]) if seq.has_row else len(seq.tokens)

    def computed(self, seq: Sequence) -> int:
        """Tokens of `seq` that are computed, or, if it holds nothing yet, that the prefix cache has."""
        if seq.has_row:
            return int(self.ledgers.num_tokens[seq.row])
        return len(self.match(seq)) * self._block_size

    def match(self, seq: Sequence) -> list[int]:
        """Blocks that hold a prefix of `seq`, which has no row. The last token is never among them: it has to be
        computed for the next one to be drawn.
        """
        if not self._prefix_cache:
            return []
        if seq.keys_generation != self._generation:
            seq.keys, seq.keys_generation = [], self._generation
        most = (len(seq.tokens) - 1) // self._block_size
        self._extend_keys(seq, seq.tokens, most)
        return self.pool.find(seq.keys[:most])

    def start(self, seq: Sequence, num_blocks: int) -> int:
        """Give `seq`, which has no row, a row with the cached blocks of its prefix and new ones up to `num_blocks`, and
        a slot. Returns the row."""
        hits = self.match(seq)
        if hits:
            self.pool.take(hits)
        blocks = self.pool.allocate(max(num_blocks - len(hits), 0))
        row = self.ledgers.open(seq)
        if self._prefix_cache:
            self.queried_tokens += len(seq.tokens)
        if hits:
            self.hit_tokens += len(hits) * self._block_size
            self.ledgers.append_blocks(row, np.array(hits, np.int32))
            self.ledgers.num_tokens[row] = len(hits) * self._block_size
            self.ledgers.num_named[row] = len(hits)
        self.ledgers.append_blocks(row, blocks)
        if self.slots is not None:
            self.ledgers.state_slot[row] = self.slots.allocate(1)[0]
        return row

    def append(self, row: int, count: int) -> None:
        if count > 0:
            self.ledgers.append_blocks(row, self.pool.allocate(count))

    def grow(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Append counts[i] >= 0 new blocks to each row, in this order."""
        growing = np.flatnonzero(counts > 0)
        if not len(growing):
            return
        rows, counts = rows[growing], counts[growing]
        led = self.ledgers
        if counts.max() == 1:
            led.block_table[rows, led.num_blocks[rows]] = self.pool.allocate(len(rows))
            led.num_blocks[rows] += 1
        else:
            for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
                self.append(row, count)

    def shrink(self, row: int, num_blocks: int) -> None:
        """Give back the blocks beyond `num_blocks`; nothing is written there."""
        self.pool.free(self.ledgers.cut_blocks(row, num_blocks))

    def release(self, seq: Sequence) -> None:
        """Give everything back. Idempotent per sequence."""
        if not seq.has_row:
            return
        self.pool.free(self.ledgers.blocks_of(seq.row))
        if self.slots is not None:
            slot = self.ledgers.state_slot[seq.row : seq.row + 1]
            self._state_copies = [(source, target) for source, target in self._state_copies if target != slot[0]]
            self.slots.free(slot)
        self.ledgers.close(seq)
        seq.forked = False

    # ---- forks

    def fork(self, parent: Sequence, child: Sequence, shared: int) -> bool:
        """Give `child` a row whose first `shared` tokens are the parent's KV, pinned. Nothing is written to these
        blocks before `own`.

        The parent's state moves on with its next step, so it is cloned right before that; False if there is no slot.
        """
        if self.slots is not None and not self.slots.num_free:
            return False
        led = self.ledgers
        blocks = led.block_table[parent.row, : self.blocks_of_length(shared)]
        self.pool.pin(blocks)
        row = led.open(child)
        led.append_blocks(row, blocks)
        led.num_tokens[row] = shared
        led.num_named[row] = shared // self._block_size
        child.keys, child.keys_generation = parent.keys[: shared // self._block_size], parent.keys_generation
        if self.slots is not None:
            slot = int(led.state_slot[parent.row])
            slot = next((source for source, target in self._state_copies if target == slot), slot)  # not cloned yet
            source = np.array([slot], np.int32)
            self.slots.pin(source)
            led.state_slot[row] = self.slots.allocate(1)[0]
            self._state_copies.append((slot, int(led.state_slot[row])))
            self._sources.append((_NO_BLOCKS, source))
        child.forked = True
        return True

    def own(self, seq: Sequence, num_blocks: int) -> None:
        """Make a fork fit for writing: a copy of the half-written last block, and new blocks up to `num_blocks`."""
        led, row = self.ledgers, seq.row
        full = int(led.num_tokens[row]) // self._block_size
        tail = led.cut_blocks(row, full)
        blocks = self.pool.allocate(num_blocks - full)
        led.append_blocks(row, blocks)
        if len(tail):
            self._block_copies.append((int(tail[0]), int(blocks[0])))
            self._sources.append((tail, _NO_BLOCKS))
        seq.forked = False

    def take_copies(self) -> tuple[np.ndarray, np.ndarray]:
        """Block and state copies that the step being issued has to make first."""
        if not self._sources:
            return _NO_COPIES, _NO_COPIES
        blocks = np.array(self._block_copies, np.int64).reshape(-1, 2)
        states = np.array(self._state_copies, np.int64).reshape(-1, 2)
        self._block_copies, self._state_copies = [], []
        self._sources_in_flight, self._sources = self._sources, []
        return blocks, states

    def copies_made(self) -> None:
        """The step in flight is settled: what its copies read is let go."""
        for blocks, slots in self._sources_in_flight:
            self.pool.free(blocks)
            if self.slots is not None:
                self.slots.free(slots)
        self._sources_in_flight = []

    # ---- blocks that nobody gets

    def withhold(self) -> None:
        """Take all blocks that are free now out of use, until `hand_back`."""
        self._withheld = np.concatenate([self._withheld, self.pool.allocate(self.pool.num_free)])

    def hand_back(self) -> None:
        self.pool.free(self._withheld)
        self._withheld = _NO_BLOCKS

    # ---- prefix cache

    def name_blocks(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """Make the blocks that `computed` tokens of each row fill findable by content."""
        if not self._prefix_cache:
            return
        led = self.ledgers
        full = computed // self._block_size
        due = (full > led.num_named[rows]).nonzero()[0]
        if not len(due):
            return
        rows, full = rows[due], full[due]
        blocks: list[int] = []
        keys: list[bytes] = []
        for row, first, end in zip(rows.tolist(), led.num_named[rows].tolist(), full.tolist(), strict=True):
            seq = led.seq_of(row)
            self._extend_keys(seq, led.tokens[row], end)
            blocks += led.block_table[row, first:end].tolist()
            keys += seq.keys[first:end]
        self.pool.name(blocks, keys)
        led.num_named[rows] = full

    def _extend_keys(self, seq: Sequence, tokens: np.ndarray, num_blocks: int) -> None:
        if len(seq.keys) < num_blocks:
            root = b"" if seq.keys else root_key(seq.keys_generation, seq.salt)
            extend_keys(seq.keys, root, tokens, num_blocks, self._block_size)

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. What present sequences compute later can only be found by those of their own age."""
        self._generation += 1
        self.pool.forget_names()

    def take_hits(self) -> int:
        """Tokens found in the cache since the last call."""
        new, self._hits_taken = self.hit_tokens - self._hits_taken, self.hit_tokens
        return new

    # ---- checks

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise if a block or slot is lost or held by nobody. `sequences`: all that hold something."""
        self.pool.check_integrity()
        sources = self._sources + self._sources_in_flight
        rows = [seq.row for seq in sequences if seq.has_row]
        held = [self.ledgers.blocks_of(row) for row in rows] + [blocks for blocks, _ in sources] + [self._withheld]
        _compare("blocks", self.pool, held)
        if self.slots is not None:
            self.slots.check_integrity()
            held = [self.ledgers.state_slot[row : row + 1] for row in rows] + [slots for _, slots in sources]
            _compare("state slots", self.slots, held)


def _compare(what: str, pool: BlockPool, held: list[np.ndarray]) -> None:
    numbers = np.concatenate(held) if held else np.zeros(0, np.int32)
    counts = np.bincount(numbers, minlength=pool.num_blocks)
    counts[NULL_BLOCK] = 0
    if not np.array_equal(counts, pool.references):
        wrong = np.flatnonzero(counts != pool.references).tolist()
        raise RuntimeError(f"scheduler: {what} {wrong} are not held as often as they are referenced")
