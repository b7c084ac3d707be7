"""Config keys with their rules: the values that a key may have are declared where the key is.

root = Keys()
rollout = root.group("rollout")
rollout.tasks = key(32, least=1)  # tasks per step
root.config, root.rules           # a ConfigDict, and {"rollout.tasks": Rule(...)}
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict


class Rule(NamedTuple):
    """The default of a key and the values that it may have.

    For a tuple, the rule is about its entries, which are texts if nothing limits them. zero: 0 is
    allowed besides, whatever the bounds are.
    """

    default: Any
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    zero: bool = False
    free: bool = False  # a group of arguments that a plug or a world defines

    def misfit(self, value):
        """Return the rule that a value breaks, such as "at least 1", or "". The type is not checked
        here."""
        if self.choices:
            values = value if isinstance(value, tuple) else (value,)
            if any(v not in self.choices for v in values):
                return f"one of {', '.join(self.choices)}"
            return ""
        if (
            isinstance(value, tuple)
            and (self.least, self.above, self.most, self.below) != (None,) * 4
        ):
            numbers = [v for v in value if isinstance(v, int | float) and not isinstance(v, bool)]
            return (
                "numbers"
                if len(numbers) < len(value)
                else next((m for v in value if (m := self.misfit(v))), "")
            )
        if isinstance(value, tuple):
            return "" if all(isinstance(v, str) for v in value) else "texts"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return ""
        if value != value or value in (float("inf"), float("-inf")):
            return "finite"
        if self.zero and value == 0:
            return ""
        holds = (
            self.least is None or value >= self.least,
            self.above is None or value > self.above,
            self.most is None or value <= self.most,
            self.below is None or value < self.below,
        )
        return "" if all(holds) else self.bounds()

    def bounds(self):
        """Return the bounds in words, such as "0, or at least 64 and at most 16777216"; "" if there
        are none."""
        limits = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        stated = {words: limit for words, limit in limits.items() if limit is not None}
        words = " and ".join(
            f"{words} {limit:{'d' if type(limit) is int else 'g'}}"
            for words, limit in stated.items()
        )
        return f"0, or {words}" if self.zero and words else words

    def nearest(self, value):
        """Return `value` if no rule forbids it, else one that is as harmless: the least one, or the
        default."""
        if not self.misfit(value):
            return value
        if (
            not (self.choices or isinstance(value, tuple))
            and self.least is not None
            and value < self.least
        ):
            return type(self.default)(self.least)
        return self.default


def key(default, *, least=None, above=None, most=None, below=None, choices=(), zero=False):
    """Declare a key's default and bounds; numbers must be finite in any case. zero: 0 is allowed
    besides."""
    return Rule(default, least, above, most, below, tuple(choices), zero)


def fraction(default):
    """Declare a key between 0 and 1."""
    return key(default, least=0, most=1)


def temperature(default):
    """Declare a sampling temperature: 0 is greedy, and smaller or larger ones than these give no
    useful samples."""
    return key(default, least=0.01, most=100, zero=True)


def use(group, name, **args):
    """Set a plug's name and arguments; the arguments of its previous callable are dropped."""
    group.name = name
    group.args = ConfigDict(args)
    group.args.unlock()


class Keys:
    """A group of keys: assigning an attribute adds a key to `config`, and its rule to `rules`."""

    def __init__(self, config=None, rules=None, prefix=""):
        values = {
            "config": ConfigDict() if config is None else config,
            "rules": {} if rules is None else rules,
        }
        vars(self).update(values, prefix=prefix)

    def __setattr__(self, name, value):
        rule = value if isinstance(value, Rule) else Rule(value)
        self.rules[self.prefix + name] = rule
        self.config[name] = rule.default

    def group(self, name):
        """Add a group of keys."""
        self.config[name] = ConfigDict()
        return Keys(self.config[name], self.rules, f"{self.prefix}{name}.")

    def plug(self, name, default):
        """Add a plug: `name` of a callable and `args`, which its signature defines
        (docs/extending.md)."""
        group = self.group(name)
        group.name = default
        group.args = Rule(ConfigDict(), free=True)
        return group
