"""Charges in a template's syntax tree, where the sandbox has no hook: bodies, slices, `~`, comparisons."""

from __future__ import annotations

import jinja2.nodes
from jinja2.visitor import NodeTransformer

__all__ = ["TemplateCharges"]

NODE_CHARS = 4  # a node of the syntax tree takes the time of so many


def hook(name: str, *args: jinja2.nodes.Expr) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), list(args), [], None, None)


def tick_for(node: jinja2.nodes.Node) -> jinja2.nodes.Call:
    """Charges for a body that may be run often, by its nodes and the constant text in it."""
    num_chars = 0
    for each in node.find_all(jinja2.nodes.Node):
        num_chars += NODE_CHARS
        if isinstance(each, jinja2.nodes.TemplateData):
            num_chars += len(each.data)
        elif isinstance(each, jinja2.nodes.Const) and isinstance(each.value, str):
            num_chars += len(each.value)
    return hook("tick", jinja2.nodes.Const(num_chars))


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

    def visit_Block(self, node: jinja2.nodes.Block) -> jinja2.nodes.Block:
        tick = tick_for(node)
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(tick))
        return node

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Dict:
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, jinja2.nodes.Const):
                pair.key = hook("charged_text", pair.key)  # it is hashed
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
