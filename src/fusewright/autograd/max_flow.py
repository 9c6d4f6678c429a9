"""Maximum flow by Dinic's algorithm, for the partitioner's minimum cut.

Takes a network with integer capacities; gives the set of vertices on the sink's side of a minimum cut, the one of them
that is nearest to the sink.
Source: E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970.
"""

from __future__ import annotations

from collections import deque

INFINITE = 1 << 60


class Network:
    """A directed network over vertices 0..n-1, built by `edge`, then cut once."""

    __slots__ = ("_adjacent", "_capacity", "_head")

    def __init__(self) -> None:
        self._adjacent: list[list[int]] = []
        self._head: list[int] = []
        self._capacity: list[int] = []

    def vertex(self) -> int:
        """A new vertex."""
        self._adjacent.append([])
        return len(self._adjacent) - 1

    def edge(self, start: int, end: int, capacity: int) -> None:
        """An edge of `capacity` (INFINITE: never cut). Edges 2k and 2k+1 are each other's reverse."""
        for head, tail, amount in ((end, start, capacity), (start, end, 0)):
            self._adjacent[tail].append(len(self._head))
            self._head.append(head)
            self._capacity.append(amount)

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self._adjacent)
        level[source] = 0
        queue = deque([source])
        while queue:
            vertex = queue.popleft()
            for edge in self._adjacent[vertex]:
                head = self._head[edge]
                if self._capacity[edge] > 0 and level[head] < 0:
                    level[head] = level[vertex] + 1
                    queue.append(head)
        return level

    def _augment(self, source: int, sink: int, level: list[int], position: list[int]) -> bool:
        """Pushes one augmenting path of the level graph (iteratively: graphs are deep); False when there is none
        left."""
        path: list[int] = []
        vertex = source
        while vertex != sink:
            edges = self._adjacent[vertex]
            while position[vertex] < len(edges):
                edge = edges[position[vertex]]
                if self._capacity[edge] > 0 and level[self._head[edge]] == level[vertex] + 1:
                    break
                position[vertex] += 1
            else:
                if not path:
                    return False
                vertex = self._head[path.pop() ^ 1]
                position[vertex] += 1
                continue
            path.append(edge)
            vertex = self._head[edge]
        amount = min(self._capacity[edge] for edge in path)
        for edge in path:
            self._capacity[edge] -= amount
            self._capacity[edge ^ 1] += amount
        return True

    def sink_side(self, source: int, sink: int) -> set[int]:
        """The vertices that `sink` can be reached from after a maximum flow: one side of a minimum cut, and the
        smallest such."""
        while True:
            level = self._levels(source)
            if level[sink] < 0:
                return self._reaching(sink)
            position = [0] * len(self._adjacent)
            while self._augment(source, sink, level, position):
                pass

    def _reaching(self, sink: int) -> set[int]:
        """The vertices with a way to `sink` along edges that have capacity left."""
        found = {sink}
        pending = [sink]
        while pending:
            for edge in self._adjacent[pending.pop()]:
                start = self._head[edge]
                if self._capacity[edge ^ 1] > 0 and start not in found:
                    found.add(start)
                    pending.append(start)
        return found
