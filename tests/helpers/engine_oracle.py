"""The rules of ``llmpq.multillm.engine`` written one iteration at a time: the tests' oracle."""

from __future__ import annotations

import math


class Sequence:
    def __init__(self, request, length, blocks):
        self.request, self.length, self.computed, self.blocks = request, length, 0, blocks


class Oracle:
    def __init__(self, law, ready, prompt, answer, following, work, start, end):
        self.law, self.prompt, self.answer, self.following = law, prompt, answer, following
        self.work, self.now, self.end = work, start, end
        self.arrivals = sorted((time, one) for one, time in enumerate(ready) if time < math.inf)
        self.waiting, self.running = [], []
        self.made, self.finish = [0] * len(prompt), [math.inf] * len(prompt)
        self.free, self.is_prefilled = law.num_blocks, set()
        self.done = self.busy = 0.0
        self.iterations = self.preemptions = 0

    def blocks(self, tokens):
        return -(-tokens // self.law.block_size)

    def play(self):
        while True:
            while self.arrivals and self.arrivals[0][0] <= self.now:
                self.waiting.append(self.arrivals.pop(0)[1])
            if not self.running and not self.waiting:
                if not self.arrivals or self.arrivals[0][0] >= self.end:
                    return
                self.now = self.arrivals[0][0]
                continue
            if self.now >= self.end:
                return
            seconds = self.mixed() if self.law.mixed else self.prefill() or self.decode()
            self.now += seconds
            self.busy += seconds
            self.iterations += 1
            for one in [one for one in self.running if one.request in self.complete]:
                self.running.remove(one)
                self.free += one.blocks
                self.finish[one.request] = self.now
                after = self.following[one.request]
                if after >= 0:
                    self.arrivals.append((self.now, after))
                    self.arrivals.sort(key=lambda arrival: arrival[0])

    @property
    def complete(self):
        return {one for one, made in enumerate(self.made) if made == self.answer[one]}

    def fits(self, length):
        left = self.free - self.blocks(length)
        return left >= (self.law.watermark_blocks if self.running else 0)

    def length(self, request):
        return self.prompt[request] + self.made[request]

    def admit(self):
        request = self.waiting.pop(0)
        one = Sequence(request, self.length(request), self.blocks(self.length(request)))
        self.free -= one.blocks
        self.running.append(one)
        return one

    def token(self, one):
        if one.request in self.is_prefilled:
            self.done += self.law.flops_token + self.law.flops_key * one.length
        else:
            self.done += self.work[one.request]
        self.is_prefilled.add(one.request)
        one.length += 1
        self.made[one.request] += 1

    def preempt(self):
        last = self.running.pop()
        self.free += last.blocks
        self.waiting.insert(0, last.request)
        self.preemptions += 1

    def prefill(self):
        admitted = []
        while self.waiting and len(self.running) < self.law.max_sequences:
            length = self.length(self.waiting[0])
            longest = max([length, *(one.length for one in admitted)])
            if admitted and (len(admitted) + 1) * longest > self.law.token_budget:
                break
            if not self.fits(length):
                break
            admitted.append(self.admit())
        if not admitted:
            return None
        longest = max(one.length for one in admitted)
        for one in admitted:
            one.computed = one.length
            self.token(one)
        fixed, slope = self.law.prefill[len(admitted)]
        return fixed + slope * len(admitted) * longest

    def decode_s(self, lengths):
        fixed, total, padded = self.law.decode[len(lengths)]
        return fixed + total * sum(lengths) + padded * len(lengths) * max(lengths)

    def decode(self):
        def needed():
            return sum(self.blocks(one.computed + 1) - one.blocks for one in self.running)

        while len(self.running) > 1 and needed() > self.free:
            self.preempt()
        seconds = self.decode_s([one.length for one in self.running])
        for one in self.running:
            one.computed += 1
            self.free -= self.blocks(one.computed) - one.blocks
            one.blocks = self.blocks(one.computed)
            self.token(one)
        return seconds

    def mixed(self):
        left, chunks, was_preempted = self.law.token_budget, [], False
        place = 0
        while place < len(self.running) and left:
            one = self.running[place]
            count = min(left, one.length - one.computed)
            more = self.blocks(one.computed + count) - one.blocks
            while more > self.free and len(self.running) > place + 1:
                self.preempt()
                was_preempted = True
            if more > self.free:
                self.preempt()
                was_preempted = True
                break
            if more > 0:
                self.free -= more
                one.blocks += more
            chunks.append((one, count))
            left -= count
            place += 1
        while (
            left and not was_preempted and self.waiting
            and len(self.running) < min(self.law.max_sequences, self.law.token_budget)
            and self.fits(self.length(self.waiting[0]))
        ):  # fmt: skip
            one = self.admit()
            chunks.append((one, min(left, one.length)))
            left -= chunks[-1][1]
        decodes = [one.computed + 1 for one, count in chunks if count == 1]
        seconds = self.decode_s(decodes) if decodes else 0.0
        tokens = sum(count for _, count in chunks)
        if tokens > len(decodes):
            linear = self.law.packed[tokens]
            if decodes:
                thin = self.decode_s([1] * len(decodes))
                linear = max(linear, thin) + max(0.0, seconds - thin)
            seconds = linear + self.law.attention * sum(
                (one.computed + count) ** 2 - one.computed**2 for one, count in chunks if count > 1
            )
        for one, count in chunks:
            one.computed += count
            if one.computed == one.length:
                self.token(one)
        return seconds
