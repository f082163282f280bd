"""A graph of LangGraph acts in an environment.

pip install 'aenv-ray[langchain]' langgraph
From a program: asyncio.run(main("mini-terminal", ChatOpenAI(model=…), "Count the files in /etc."))
"""

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from aenv_ray import Environment
from aenv_ray.integrations.langchain import tools


async def main(environment: str, model: BaseChatModel, task: str) -> None:
    async with Environment(environment) as env:
        offered = await tools(env)
        asked = model.bind_tools(offered)
        graph = StateGraph(MessagesState)
        graph.add_node("model", lambda state: {"messages": [asked.invoke(state["messages"])]})
        graph.add_node("tools", ToolNode(offered))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        state = await graph.compile().ainvoke({"messages": [HumanMessage(task)]})
        print(state["messages"][-1].content)
