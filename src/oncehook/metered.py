"""JSONPath queries of the library, with a count of the values that they look at.

`payload` compiles a path and calls `meter_query`. The library makes a node for each value that it visits, so nodes of
our own count; a query inside a filter begins with a node of the library's, and is replaced by one that counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jsonpath_rfc9535.filter_expressions import Expression, FilterQuery
from jsonpath_rfc9535.node import JSONPathNode
from jsonpath_rfc9535.query import JSONPathQuery
from jsonpath_rfc9535.selectors import FilterSelector

if TYPE_CHECKING:
    from oncehook.payload import Meter


class _MeteredNode(JSONPathNode):
    __slots__ = ("_meter",)

    def __init__(self, meter: Meter, value: object, location: tuple[int | str, ...], root: Any) -> None:
        meter.count(value)
        super().__init__(value=value, location=location, parent=None, root=root)
        self._meter = meter

    def new_child(self, value: object, key: int | str, parent: JSONPathNode | None) -> JSONPathNode:
        return _MeteredNode(self._meter, value, (*self.location, key), self.root)


class _MeteredQuery(JSONPathQuery):
    __slots__ = ("_meter",)

    def __init__(self, query: JSONPathQuery, meter: Meter) -> None:
        super().__init__(env=query.env, segments=query.segments)
        self._meter = meter

    def finditer(self, value: Any) -> Iterable[JSONPathNode]:
        """Yield the values that the query finds. Raises OverBudget, possibly after some of them."""
        nodes: Iterable[JSONPathNode] = [_MeteredNode(self._meter, value, (), value)]
        for segment in self.segments:
            nodes = segment.resolve(nodes)
        return nodes


def meter_query(query: JSONPathQuery, meter: Meter) -> Any:
    """Return a query that counts, also inside its filters."""
    for segment in query.segments:
        for selector in segment.selectors:
            if isinstance(selector, FilterSelector):
                _meter_expression(selector.expression, meter)
    return _MeteredQuery(query, meter)


def _meter_expression(expression: object, meter: Meter) -> None:
    if isinstance(expression, FilterQuery):
        expression.query = meter_query(expression.query, meter)
    elif isinstance(expression, Expression):
        for name in ("expression", "left", "right"):
            _meter_expression(getattr(expression, name, None), meter)
        for argument in getattr(expression, "args", ()):
            _meter_expression(argument, meter)
