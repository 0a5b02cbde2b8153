"""Jinja's compiler, changed so that templates keep runs and run within `limits`."""

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators


class Compiler(CodeGenerator):
    """Jinja's compiler; its code calls the environment for all operations that `limits` charges.

    Other operators are compiled to `call_binop`, and calls to `call`, by Jinja itself.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bodies: set[int] = set()
        self._filtered: set[int] = set()

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: D102, N802  (Jinja's name)
        self._bodies.add(id(node.body))
        if node.test is not None:  # items that the test refuses do not reach the body
            self._filtered.add(id(node.iter))
        super().visit_For(node, frame)

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        """Compile the statements of a block; the body of a loop begins with a step."""
        if id(nodes) in self._bodies:
            self.writeline("environment.step()")
        super().blockvisit(nodes, frame)

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Compile a node."""
        if id(node) not in self._filtered:
            return super().visit(node, *args, **kwargs)
        self._filtered.discard(id(node))
        return self._call("counted", node, args[0])

    def _call(self, name: str, node: nodes.Node, frame: Frame) -> None:
        """Write a call of a method of the environment with the value of `node`."""
        self.write(f"environment.{name}(")
        self.visit(node, frame)
        self.write(")")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: D102, N802
        # `a + b + c` is (a + b) + c, and becomes one call with three values.
        values = [node.right]
        first = node.left
        while isinstance(first, nodes.Add):
            values.append(first.right)
            first = first.left
        self.write("environment.add(")
        for each in (first, *reversed(values)):
            self.visit(each, frame)
            self.write(", ")
        self.write(")")

    # Jinja's own code for `~` calls `str_join`, which returns a plain string.
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: D102, N802
        self.write("environment.concat(map(environment.written, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: D102, N802
        # Comparing with a constant takes one step, and so does a search in a list of constants.
        # Other comparisons may walk through two large values, or search a large one.
        sides = [node.expr, *(each.expr for each in node.ops)]
        searches = any(each.op in ("in", "notin") for each in node.ops)
        constant = [_is_constant(each) for each in sides]
        is_cheap = constant[-1] if searches else any(constant)
        method = "counted" if constant[0] else "measured"
        self.write("(")
        for side, fixed, operand in zip(sides, constant, [None, *node.ops], strict=True):
            if operand is not None:
                self.write(f" {operators[operand.op]} ")
            if fixed or (is_cheap and len(sides) == 2):
                self.visit(side, frame)
            else:
                self._call(method, side, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: D102, N802
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.counted(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            super().visit_Getitem(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: D102, N802
        self.write("{")
        for item in node.items:
            # Python computes the hash of a key, which walks through all of a tuple.
            if _is_constant(item.key):
                self.visit(item.key, frame)
            else:
                self._call("measured", item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        # Jinja writes the text of other constants, such as the method `'a'.join`, into the code.
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        is_plain = not (frame.eval_ctx.volatile or frame.eval_ctx.autoescape)
        if not is_plain:
            super()._output_child_pre(node, frame, finalize)
        self.write("environment.written(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_post(node, frame, finalize)


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_constant, node.items))
    return isinstance(node, nodes.Const)
