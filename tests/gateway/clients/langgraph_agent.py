"""A LangGraph graph around ChatOpenAI. `--compact` replaces the history by a summary before the last turn."""

import argparse

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, RemoveMessage
from langgraph.prebuilt import ToolNode, tools_condition

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--compact", action="store_true")
args = parser.parse_args()


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


model = ChatOpenAI(model="policy", streaming=args.stream)
calculator = model.bind_tools([add, multiply])
SYSTEM = SystemMessage("You calculate with tools.")


def call(state: MessagesState):
    return {"messages": [calculator.invoke([SYSTEM, *state["messages"]])]}


def compact(state: MessagesState):
    """What was said so far, as one message that the model writes itself."""
    if not args.compact or len(state["messages"]) != 6:
        return {}
    order = HumanMessage("Summarise the conversation.")
    summary = calculator.invoke([SYSTEM, *state["messages"], order]).content
    again = HumanMessage(f"{args.question}\nSo far: {summary}")
    return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), again]}


graph = StateGraph(MessagesState)
graph.add_node("call", call)
graph.add_node("tools", ToolNode([add, multiply]))
graph.add_node("compact", compact)
graph.add_edge(START, "call")
graph.add_conditional_edges("call", tools_condition, ["tools", END])
graph.add_edge("tools", "compact")
graph.add_edge("compact", "call")
state = graph.compile().invoke({"messages": [("user", args.question)]})
print(state["messages"][-1].content)
