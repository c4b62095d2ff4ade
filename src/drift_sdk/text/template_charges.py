"""Charges in a template's syntax tree, where the sandbox has no hook: bodies, slices, `~`, comparisons."""

from __future__ import annotations

import jinja2.nodes
from jinja2.visitor import NodeTransformer

__all__ = ["TemplateCharges"]


def hook(name: str, *args: jinja2.nodes.Expr) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), list(args), [], None, None)


def tick_for(node: jinja2.nodes.Node) -> jinja2.nodes.Call:
    """Charges for a body that may be run often, with the constant text in it."""
    texts = [each.data for each in node.find_all(jinja2.nodes.TemplateData)]
    texts += [each.value for each in node.find_all(jinja2.nodes.Const) if isinstance(each.value, str)]
    return hook("tick", jinja2.nodes.Const(sum(map(len, texts))))


class TemplateCharges(NodeTransformer):
    """Rewrites a tree to call the hooks of `BudgetedEnvironment`."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        tick = tick_for(node)
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(tick))
        if node.test is not None:
            node.test = jinja2.nodes.And(hook("tick", jinja2.nodes.Const(0)), node.test)
        return node

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Macro:
        tick = tick_for(node)
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(tick))
        return node

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.CallBlock:
        tick = tick_for(node)
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(tick))
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
