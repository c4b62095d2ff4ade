"""Charges that are added to a template's syntax tree, where Jinja's sandbox has no hook."""

from __future__ import annotations

import jinja2.nodes
from jinja2.visitor import NodeTransformer

__all__ = ["TemplateCharges"]

NODE_CHARS = 4  # charged for a node of the syntax tree, which takes as long

Body = jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.Block | jinja2.nodes.CallBlock


def hook(name: str, *args: jinja2.nodes.Expr) -> jinja2.nodes.Call:
    """A call of an attribute of the environment, as a node of a syntax tree."""
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), list(args), [], None, None)


def tick_for(node: jinja2.nodes.Node) -> jinja2.nodes.Call:
    """A call of `tick` for a body that may be executed many times, by its nodes and its constant text."""
    num_chars = 0
    for each in node.find_all(jinja2.nodes.Node):
        num_chars += NODE_CHARS
        if isinstance(each, jinja2.nodes.TemplateData):
            num_chars += len(each.data)
        elif isinstance(each, jinja2.nodes.Const) and isinstance(each.value, str):
            num_chars += len(each.value)
    return hook("tick", jinja2.nodes.Const(num_chars))


class TemplateCharges(NodeTransformer):
    """Adds calls of the functions of `BudgetedEnvironment` to a template's syntax tree.

    They charge for bodies of loops, macros, blocks and call blocks, and for keys of dicts, slices, `~` and
    comparisons.
    """

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        self._charge_body(node)
        if node.test is not None:
            node.test = jinja2.nodes.And(hook("tick", jinja2.nodes.Const(0)), node.test)
        return node

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Macro:
        self._charge_body(node)
        return node

    def visit_Block(self, node: jinja2.nodes.Block) -> jinja2.nodes.Block:
        self._charge_body(node)
        return node

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.CallBlock:
        self._charge_body(node)
        return node

    def _charge_body(self, node: Body) -> None:
        tick = tick_for(node)  # before the visit, which adds nodes to the body
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(tick))

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Dict:
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, jinja2.nodes.Const):
                pair.key = hook("charged_text", pair.key)  # keys are hashed
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return hook("concatenated", *node.nodes)

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.expr = hook("charged_text", node.expr)
        for operand in node.ops:
            operand.expr = hook("charged_text", operand.expr)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return hook("charged_slice", node) if isinstance(node.arg, jinja2.nodes.Slice) else node
