"""Agents that answer many observers in one batch: CartPole, learnt by policy gradients (REINFORCE).

    torchrun --standalone --nproc_per_node=5 rpc_basics/batched_inference.py
    torchrun --standalone --nproc_per_node=6 rpc_basics/batched_inference.py --agents 2
    torchrun --standalone --nproc_per_node=9 rpc_basics/batched_inference.py --measure

The first workers are agents: they have the policy. The others observe: each plays a few games and
asks its agent for every action. An answer waits until all observers have asked; then one forward is
for all of them. Look at how long the poles stand, and with --measure at the answers per second,
batched and one by one.
"""

import argparse
import statistics
import threading
from functools import partial

import cartpole
import torch
from arguments import ArgumentParser, above, at_least
from calls_in_flight import as_they_end
from measuring import rates_in_turn
from rpc_worker import RpcWorker, rpc_worker
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future

LIMIT = 200  # steps of a game; a reward of 1 for each
WIDTHS = (64, 512, 2048)  # of the policies that --measure compares


@record
def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the workers are what runs side by side
    with rpc_worker(args.timeout, least=args.agents + 1, required=range(args.agents)) as worker:
        if worker.rank == 0:  # the first agent also starts the games; the others wait for calls
            if args.measure:
                measure(args, worker)
            else:
                learn(args, worker)


class Agent:
    """A policy, and the questions that wait for it."""

    def __init__(self, observers: list[int], width: int, seed: int):
        torch.manual_seed(seed)
        self.policy = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width))
        self.policy.extend([nn.Tanh(), nn.Linear(width, 2)])
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.005)
        self.observers = set(observers)  # who may ask
        self.playing = set(observers)  # whose question is waited for
        self.asked: dict[int, Tensor] = {}
        self.answers = Future()  # what all of them wait for: by observer, the actions
        self.lock = threading.Lock()
        self.seen = {observer: [] for observer in observers}  # states and actions, step by step

    @rpc.functions.async_execution
    def act(self, observer: int, states: Tensor) -> Future:
        """states: (games, 4) fp32. Answers with actions, (games,) int64, once all have asked.

        A function with this decorator returns a Future, and its caller gets the answer when
        somebody sets it. No thread waits here meanwhile.
        """
        with self.lock:
            if observer not in self.observers:
                raise ValueError(f"worker{observer} did not answer, and was given up")
            self.asked[observer] = states
            mine = self.answers.then(lambda answers: answers.value()[observer])
            self.answer_if_all_have_asked()
        return mine

    def answer_if_all_have_asked(self) -> None:
        if not self.asked or not self.playing <= set(self.asked):
            return
        asked, answers = self.asked, self.answers
        self.asked, self.answers = {}, Future()
        observers = sorted(asked)  # in any order of arrival the same actions are drawn
        actions = self.draw(torch.cat([asked[observer] for observer in observers]))
        pieces = actions.split([len(asked[observer]) for observer in observers])
        by_observer = dict(zip(observers, pieces, strict=True))
        for observer in observers:
            self.seen[observer].append((asked[observer], by_observer[observer]))
        answers.set_result(by_observer)

    def act_alone(self, states: Tensor) -> Tensor:
        """The same for one observer at once: what --measure compares with."""
        return self.draw(states)

    def draw(self, states: Tensor) -> Tensor:
        with torch.no_grad():
            return self.policy(states).softmax(1).multinomial(1).squeeze(1)

    def stop(self, observer: int) -> None:
        """Its games are over: the others are not to wait for it."""
        with self.lock:
            self.playing.discard(observer)
            self.answer_if_all_have_asked()

    def gradient(self, lengths: dict[int, Tensor]) -> list[Tensor]:
        """Of the games since the last update. lengths: by observer, the steps of each of its games.

        What follows an action is how long the pole still stood. Above the mean makes the action
        likelier, below it unlikelier.
        """
        states, actions, returns = [], [], []
        for observer, lengths_of_games in lengths.items():
            for step, (seen, done) in enumerate(self.seen[observer]):
                stands = lengths_of_games > step  # the others had fallen before
                states.append(seen[stands])
                actions.append(done[stands])
                returns.append((lengths_of_games[stands] - step).float())
        returns = torch.cat(returns)
        advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
        logits = self.policy(torch.cat(states))
        chosen = nn.functional.cross_entropy(logits, torch.cat(actions), reduction="none")
        return list(torch.autograd.grad((chosen * advantage).mean(), self.policy.parameters()))

    def step(self, gradient: list[Tensor]) -> None:
        """Change the policy; then all may ask again."""
        for parameter, of_parameter in zip(self.policy.parameters(), gradient, strict=True):
            parameter.grad = of_parameter
        self.optimizer.step()
        self.seen = {observer: [] for observer in self.observers}
        self.playing = set(self.observers)

    def remove(self, observer: int) -> None:
        """It is gone."""
        self.observers.discard(observer)
        self.stop(observer)

    def parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.policy.parameters()]


def play(agent: rpc.RRef, observer: int, games: int, seed: int) -> Tensor:
    """What an observer does in a round: play until all poles have fallen; returns their steps."""
    states = cartpole.start(games, torch.Generator().manual_seed(seed))
    lengths = torch.zeros(games, dtype=torch.int64)
    stands = torch.ones(games, dtype=torch.bool)
    while stands.any() and lengths.max() < LIMIT:
        actions = agent.rpc_sync().act(observer, states)
        states, falls = cartpole.step(states, actions)
        lengths += stands
        stands &= ~falls
    agent.rpc_sync().stop(observer)
    return lengths


def learn(args: argparse.Namespace, worker: RpcWorker) -> None:
    observers = list(range(args.agents, worker.world_size))
    agent_of = {observer: observer % args.agents for observer in observers}
    agents = []
    for k in range(args.agents):
        own = [observer for observer in observers if agent_of[observer] == k]
        agents.append(rpc.remote(RpcWorker.name_of(k), Agent, args=(own, args.width, args.seed)))
    rewards = []
    for number in range(args.rounds):
        calls = {}
        for observer in observers:
            seed = hash((args.seed, number, observer))
            told = (agents[agent_of[observer]], observer, args.games, seed)
            calls[observer] = rpc.rpc_async(RpcWorker.name_of(observer), play, args=told)
        lengths = {}
        for observer, call in as_they_end(calls):
            if call:
                lengths[observer] = call.wait()
            else:
                print(f"worker{observer} is gone, the others go on", flush=True)
                agents[agent_of[observer]].rpc_sync().remove(observer)
                observers.remove(observer)
        if not observers:
            raise RuntimeError("no observer is left")
        # Each agent from the games of its own observers; all take the same step.
        gradients = []
        for k, agent in enumerate(agents):
            own = {o: lengths[o] for o in sorted(lengths) if agent_of[o] == k}
            if own:
                gradients.append(agent.rpc_async().gradient(own))
        gradients = torch.futures.wait_all(gradients)
        mean = [sum(of_agents) / len(gradients) for of_agents in zip(*gradients, strict=True)]
        torch.futures.wait_all([agent.rpc_async().step(mean) for agent in agents])
        rewards.append(torch.cat([lengths[o] for o in sorted(lengths)]).float().mean().item())
        if number % 5 == 4:
            print(f"round {number + 1:3}   reward {statistics.mean(rewards[-5:]):6.1f}", flush=True)
    first, *others = [agent.rpc_sync().parameters() for agent in agents]
    same = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    print(f"{args.agents} agent(s) with the same policy: {same}")
    begin, end = statistics.mean(rewards[:3]), statistics.mean(rewards[-3:])
    print(f"mean reward of the first 3 rounds {begin:.1f}, of the last 3 {end:.1f}")


def measure(args: argparse.Namespace, worker: RpcWorker) -> None:
    """Answers per second, batched and one by one in turn, for policies of several widths."""
    observers = list(range(1, worker.world_size))
    print(f"{len(observers)} observers, answers per second, median (least to most)")
    print(f"{'width':>6}{'batched':>24}{'one by one':>24}{'ratio':>7}")
    for width in WIDTHS:
        agent = rpc.remote(RpcWorker.name_of(0), Agent, args=(observers, width, args.seed))

        def ask_all(batched: bool, agent=agent) -> None:
            asks = (agent, args.asks, batched)
            calls = [rpc.rpc_async(RpcWorker.name_of(o), ask, args=(*asks, o)) for o in observers]
            torch.futures.wait_all(calls)

        both = partial(ask_all, True), partial(ask_all, False)
        rates = rates_in_turn(*both, args.asks * len(observers), args.repeats)
        print(f"{width:6}{rates}", flush=True)


def ask(agent: rpc.RRef, number: int, batched: bool, observer: int) -> None:
    """What an observer does while it is measured."""
    states = torch.zeros(1, 4)
    for _ in range(number):
        if batched:
            agent.rpc_sync().act(observer, states)
        else:
            agent.rpc_sync().act_alone(states)


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description="Agents that answer their observers in batches.")
    add = parser.add_argument
    add("--agents", type=at_least(1), default=1, help="the first workers; the others observe")
    add("--rounds", type=at_least(3), default=40, help="of games, an update after each")
    add("--games", type=at_least(1), default=4, help="that an observer plays at once")
    add("--width", type=at_least(1), default=32, help="of the policy's hidden layers")
    add("--seed", type=at_least(0), default=0)
    add("--measure", action="store_true", help="answers per second instead of learning")
    add("--asks", type=at_least(1), default=100, help="of each observer, in a measurement")
    add("--repeats", type=at_least(1), default=5, help="measurements of each kind")
    add("--timeout", type=above(0), default=60, help="seconds, of each call")
    return parser.parse_args()


if __name__ == "__main__":
    main()
