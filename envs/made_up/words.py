"""Words of made-up worlds: pools that worlds draw from, and words that no language has."""

import random


def _words(text: str) -> list[str]:
    return text.split()


def _lines(text: str) -> list[str]:
    return text.split("\n")


# What entities are called.
NOUNS = _words(
    "crate parcel truck depot ticket agent ship port cargo lamp switch engine pump valve tank pipe "
    "field crop farm barn horse cow sheep boat bridge tower garden tree flower seed recipe dish "
    "meal oven plate bottle cup shelf box bag key lock gate door wall floor desk chair table clock "
    "camera phone radio screen robot drone sensor server job task queue worker team client "
    "contract invoice project report chart page story song album band player match league coach "
    "course lesson student teacher school exam grade patient doctor nurse ward bed visit sample "
    "test machine tool part wheel battery cable panel module package letter stamp coin badge pass "
    "permit claim case vote ballot council street house tenant lease owner pet cat dog bird fish "
    "guest hotel bus driver route stop train track wagon plane pilot crew rocket planet star "
    "mission base signal channel topic thread post comment reader author poem painting museum "
    "statue exhibit actor scene film costume dancer stage printer folder note memo reminder alarm "
    "meeting event slot booth stand vendor market stall basket product brand shop counter queue "
    "account wallet token voucher rule policy record entry label tag list plan step goal issue "
    "branch release build"
)

# Verbs that bring an entity into a state, the state, and the state before.
CHANGES = tuple(
    tuple(line.split())
    for line in _lines(
        "seal sealed open\nopen opened closed\nlock locked unlocked\napprove approved pending\n"
        "clean clean dirty\nrepair working broken\nstart running stopped\nstop stopped running\n"
        "pack packed loose\ninspect inspected unchecked\nsign signed unsigned\ncharge full empty\n"
        "fill full empty\nempty empty full\nwash washed unwashed\npaint painted plain\n"
        "archive archived active\nactivate active inactive\npublish public draft\n"
        "cancel cancelled valid\nconfirm confirmed open\nwake awake asleep\nfeed fed hungry\n"
        "water watered dry\nload loaded idle\nrelease released held\nverify verified unverified\n"
        "register registered new\ncool cold warm\ndry dry wet\nfold folded flat\nmark marked bare\n"
        "mute silent loud\nhide hidden visible\nshow visible hidden\npause paused playing\n"
        "resume playing paused\nrefuel fuelled drained\nunpack ready boxed\ninvite invited alone\n"
        "train trained raw\ncalibrate exact rough\nreset zero used\nblock blocked free\n"
        "free free blocked\npromote senior junior\n"
        "dismiss dismissed present\nscan scanned unknown\n"
        "print printed waiting\nsend sent drafted\nreturn returned away\nclose closed open\n"
        "rinse rinsed soapy\nstore stored out\nharvest harvested growing\nplant planted bare"
    )
)

# Verbs that bring one entity to another, the preposition, and what the other is to the first.
LINKS = tuple(
    tuple(line.split())
    for line in _lines(
        "assign to holder\nmove to place\nattach to host\nship to target\nhand to keeper\n"
        "connect to link\nadd to group\nput into container\nplace on base\ngive to owner\n"
        "transfer to site\nsubmit to reviewer\nrent to renter\nroute through via\nbind to parent\n"
        "send to receiver\nhold for holder\nreserve for user\nship from origin\nname after model\n"
        "join with partner\npair with partner\nsell to buyer\nenrol in group\ndeliver to address\n"
        "couple with engine\nstore in store\nhang on hook\nschedule on day\npromise to friend"
    )
)

# Attributes with the values that they can have.
CHOICES = tuple(
    (name, tuple(values.split()))
    for name, values in (
        ("colour", "red blue green white black yellow brown grey pink"),
        ("size", "small medium large huge tiny"),
        ("priority", "low normal high urgent"),
        ("mode", "auto manual eco boost sleep"),
        ("shape", "round square flat long oval"),
        ("speed", "slow medium fast"),
        ("level", "one two three four five"),
        ("zone", "north south east west centre"),
        ("season", "spring summer autumn winter"),
        ("material", "wood metal glass paper plastic stone"),
        ("language", "english french german spanish dutch"),
        ("shift", "early late night"),
        ("category", "alpha beta gamma delta"),
        ("direction", "left right up down forward back"),
        ("day", "monday tuesday wednesday thursday friday saturday sunday"),
        ("status", "open done blocked review"),
        ("kind", "basic plus prime ultra"),
        ("flavour", "sweet sour salty bitter"),
        ("format", "text image audio video"),
        ("stage", "first second third last"),
    )
)
NUMBERS = _words(
    "weight price count volume age rank score quantity capacity width height depth load limit rate "
    "distance duration pressure power stock units floor year points"
)
# What a number counts: a name of parameters ("minutes"), and a word of queries ("22 minutes").
UNITS = _words(
    "percent minutes hours days metres litres kilos points steps euros seats pages pieces "
    "volts watts miles turns coins cents grams"
)
TEXTS = _words("text title comment summary message subject caption body label remark")
FLAGS = _words("active public urgent shared private enabled favourite secure fragile taxed")
PATTERNS = _words("date time email path phone amount version url")
PEOPLE = _words(
    "Ada Alan Alma Amir Anna Aron Bela Bert Bo Cara Carl Chloe Clara Dan Dina Dirk Ed Elena Eli "
    "Elsa Eric Eva Faye Fay Fritz Gail Gita Greg Gwen Hugo Ida Igor Ines Iris Ivan Jack Jade Jan "
    "Jin Joan Joel Jon Josh Juan Judy June Kai Karl Kate Ken Kim Kira Kurt Lara Lena Leo Lila Lin "
    "Lisa Liv Luis Luke Mara Marc Maria Mark Mary Mia Mike Mila Mina Mona Nadia Ned Nick Nina Noa "
    "Noel Nora Olga Omar Otto Paul Pia Rita Rob Rosa Ruth Sam Sara Seth Sven Tara Ted Theo Tia Tom "
    "Uma Ute Vera Viv Walt Wim Xena Yan Yara Yves Zoe"
)
THINGS = _words(
    "Amber Apollo Arrow Aspen Aurora Basil Beacon Birch Breeze Canyon Cedar Comet Coral Crystal "
    "Delta Echo Ember Falcon Fern Flint Forest Galaxy Ginger Glacier Granite Harbor Hazel Heron "
    "Horizon Indigo Iron Ivory Jasmine Jasper Juniper Lagoon Laurel Lemon Lotus Lunar Maple Marble "
    "Meadow Mercury Mint Nebula Nectar Nova Oasis Ocean Olive Onyx Opal Orbit Orchid Pebble Pepper "
    "Pine Polar Poppy Quartz Raven Ridge River Ruby Saffron Sage Sierra Silver Solar Sparrow "
    "Summit Sunset Thunder Tiger Topaz Tulip Valley Velvet Violet Willow Zephyr Rome Oslo Paris "
    "Lima Cairo Delhi Tokyo Quito Berlin Madrid Vienna Dublin Lisbon Prague Athens Bergen Geneva"
)
PLAIN = _words(
    "blue call check buy milk send plan old new first draft team visit fix list the of and for "
    "with big long short lunch trip idea work home budget notes photo music travel garden report "
    "meeting monday review data final copy summer letter"
)
SYLLABLES = _words(
    "ba be bi bo bu da de di do du fa fe fo ga ge gi go gu ka ke ki ko ku la le li lo lu ma me "
    "mi mo mu na ne ni no nu pa pe pi po pu ra re ri ro ru sa se si so su ta te ti to tu va ve vi "
    "vo wa we za ze zo bra cra dra fla gro kel mar nor pel quin ras sol tar ven wex xan yor zim"
)
ONSETS = _words(
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sk sl sm sn "
    "sp st str sw t th tr tw v w wh y z"
)
VOWELS = _words("a a e e i i o o u ai ea ee oa oo ou ie y")
CODAS = _words(
    "b ck ct d ff ft g l ld lk ll lt m mp n nd ng nk nt p r rd rk rm rn rt s sh sk ss st t tch th x"
)
# How people ask for things. {verb} {e}: of the tool, and the entity; {a} {v}: the attribute and
# its new value; {prep}: of the tool. The first words of a request may follow "please" or "can you".
PUT_REQUESTS = ("{verb} {e}", "{verb} {e}", "{verb} {e} now", "have somebody {verb} {e}")
PUT_BY_VALUE = _lines(
    "make {e} {v}\nmake sure that {e} is {v}\nget {e} {v}\nsee to it that {e} is {v}\n"
    "bring {e} into the state {v}\nhave {e} {v}"
)
PUT_STATEMENTS = _lines(
    "{e} should be {v}\n{e} has to be {v}\nI want {e} to be {v}\n{e} must be {v}\n{e} is to be {v}"
)
SET_REQUESTS = _lines(
    "{verb} the {a} of {e} to {v}\n{verb} the {a} of {e} to {v}\nmake the {a} of {e} {v}\n"
    "{verb} {e}'s {a} to {v}\ngive {e} the {a} {v}\nput {v} as the {a} of {e}\n"
    "for {e}, {verb} the {a} to {v}\ngive {e} {v} as its {a}\nlet {e} have the {a} {v}\n"
    "turn the {a} of {e} to {v}\nuse {v} as the {a} of {e}\n{verb} the {a} to {v} for {e}"
)
SET_STATEMENTS = _lines(
    "the {a} of {e} should be {v}\n{e} should have the {a} {v}\n{e} needs {v} as its {a}\n"
    "I want {v} as the {a} of {e}\n{e} gets the {a} {v}\nthe {a} of {e} has to be {v}"
)
# Where one attribute of a kind alone can be set, its name need not be said.
SET_BRIEFLY = _lines(
    "{verb} {e} to {v}\nlet it be {v} at {e}\nhave {v} in {e}\nbring {e} to {v}\n"
    "put {e} at {v}\nturn {e} to {v}\nmake {e} {v}\ngive {e} {v}\nI want {v} for {e}\n"
    "we need {v} in {e}"
)
LINK_REQUESTS = ("{verb} {e} {prep} {v}", "{verb} {e} {prep} {v}", "{verb} {e} now {prep} {v}")
QUESTIONS = _lines(
    "what is the {a} of {e}\nwhat {a} does {e} have\nwhich {a} does {e} have\n"
    "tell me the {a} of {e}\nsay the {a} of {e}\ngive me the {a} of {e}\nfind the {a} of {e}\n"
    "I want to know the {a} of {e}\nI need the {a} of {e}\nlook up the {a} of {e}"
)
OPENINGS = (
    "", "", "", "", "please ", "please ", "I need you to ", "can you ", "could you ", "would you ",
    "I would like you to ", "go and ", "now ",
)  # fmt: skip
GREETINGS = (
    "Hello! ",
    "Good morning. ",
    "There is something to do. ",
    "I am back. ",
    "One thing: ",
)
CLOSINGS = (", please", " for me", " today", " right now", ", thanks", " as soon as you can")
SUFFIXES = (".txt", ".md", ".csv", ".log", ".json", ".py")


def coined(rng: random.Random) -> str:
    """Return a word that no language has, such as "kelmo" or "strund": there are too many of them
    to know them by heart."""
    if rng.random() < 0.3:
        return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))
    parts = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 2))]
    return "".join(parts) + rng.choice(CODAS)


def patterned(name: str, rng: random.Random) -> str:
    """Return a value in the form that the attribute's name in PATTERNS says."""
    a, b = coined(rng), rng.choice(PLAIN)
    return {
        "date": f"2024-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
        "time": f"{rng.randint(0, 23):02}:{rng.choice(('00', '15', '30', '45'))}",
        "email": f"{a}@{b}.com",
        "path": f"/{b}/{a}{rng.choice(SUFFIXES)}",
        "phone": f"555-{rng.randint(1000, 9999)}",
        "amount": f"{rng.randint(1, 99)}.{rng.choice(('00', '50', '25', '99'))}",
        "version": f"{rng.randint(0, 9)}.{rng.randint(0, 9)}.{rng.randint(0, 9)}",
        "url": f"https://{a}.org/{b}",
    }[name]


def plural(noun: str) -> str:
    """Return the plural of a noun of the pools."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")
