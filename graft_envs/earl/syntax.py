"""How the calculator of EARL's tasks is called, answered and explained.

tags      <calculator> 12 + 6 </calculator>    <result> 18 </result>
actions    calculate 12 + 6 =                  18, bare: the actions write the text around it
"""

from __future__ import annotations

from graft.envs.calculator import CalculatorSyntax
from graft.tools.calculator import Calculator
from graft.tools.formats import CallStyle, bare

TAGS = CalculatorSyntax(
    format="tags",
    style=CallStyle(
        open="<calculator>",
        close="</calculator>",
        result=" <result> {} </result>",
        spent=" <result> No calls are left. Give the final answer. </result>",
    ),
    call="<calculator> {} </calculator>",
    gap="\n",
    hint=" You may use a calculator as often as you like: write an expression between <calculator> and "
    "</calculator>, and its value comes back between <result> and </result>. "
    "Example: <calculator> (12 + 6) / 3 </calculator> <result> 6 </result>",
)
ACTIONS = CalculatorSyntax(
    format="actions",
    style=bare(Calculator.name),
    call=" calculate {} =",
    gap="",  # the actions end a result with a line break
    hint=" You may use a calculator as often as you like: write the keyword calculate and then an "
    "expression; its value follows the equals sign. Example: calculate (12 + 6) / 3 = 6",
)
SYNTAXES = {"tags": TAGS, "actions": ACTIONS}
