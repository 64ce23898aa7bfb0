"""Write a workload of many varied prompts for a draft to learn from: `python benchmarks/draft_prompts.py OUT.jsonl`.

A draft learns what its target writes, so it needs many different answers of the kinds it will meet. The prompts here
are put together from this interpreter's own library (functions, docstrings) and from lists, under a seed. They
are for `python -m assc distill --workload OUT.jsonl` only, and share no text with the workload `mixed`; nothing is measured on them.
"""

# ruff: noqa: E501  (lists and templates read better on long lines)

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

TOPICS = """photosynthesis; inflation; the water cycle; black holes; vaccines; plate tectonics; jazz; sourdough bread; the French
Revolution; recursion; electric cars; coral reefs; chess openings; the immune system; tides; volcanoes; the Silk Road; solar panels;
beekeeping; gravity; the printing press; haiku; marathon training; the stock market; composting; bridges; dreams; antibiotics;
migration of birds; the Roman army; machine learning; neural networks; blockchain; encryption; operating systems; compilers;
hash tables; binary search; public transport; urban gardens; glaciers; the moons of Jupiter; Impressionism; opera; origami; coffee
roasting; knitting; meditation; time management; public speaking; job interviews; negotiating a salary; learning a language; raising
a puppy; houseplants; saving money; mortgages; renewable energy; nuclear fusion; evolution; DNA; the human heart; sleep; nutrition;
allergies; stress; friendship; grief; the Great Wall of China; ancient Egypt; the Vikings; the Cold War; democracy; trade unions;
supply and demand; taxes; insurance; startups; marketing; open source; version control; unit tests; databases; web servers;
climate change; recycling; deserts; rainforests; penguins; wolves; octopuses; spiders; mushrooms; cheese; chocolate; tea;
lighthouses; trains; sailing; cycling; football; tennis; swimming; hiking; photography; watercolours; guitars; drums""".replace(
    "\n", " "
).split(";")
ASKS = (
    "Explain {t} to {w}.",
    "What should {w} know about {t}?",
    "Write a short story about {t} for {w}.",
    "Give me {n} surprising facts about {t}.",
    "Write a poem about {t}.",
    "Compare {t} and {u} in a few paragraphs.",
    "List {n} common mistakes people make with {t}, and how to avoid them.",
    "Draft an email to {w} about {t}.",
    "I want to learn about {t}. Make me a plan for {n} weeks.",
    "Write a dialogue between two people who disagree about {t}.",
    "What are the pros and cons of {t}?",
    "Can you help me understand {t}? I only know a little about {u}.",
    "Write a blog post of about 200 words on {t}.",
    "Summarise the history of {t} in {n} bullet points.",
    "What is the most important thing about {t}, in your opinion, and why?",
)
WHO = (
    "a ten-year-old",
    "a beginner",
    "my grandmother",
    "a busy manager",
    "a university student",
    "a new colleague",
    "someone who dislikes it",
    "a journalist",
    "my neighbour",
    "a class of teenagers",
)
NAMES = "Anna Ben Chloe David Elif Femi Grace Hugo Ines Jonas Kofi Lena Mateo Nadia Omar Priya Quentin Rosa Sami Tara Uma Viktor Wendy Yusuf Zoe".split()
SURNAMES = "Adler Brandt Castillo Dubois Eriksen Fischer Garcia Haddad Ivanov Jensen Kaur Lopez Moreau Nakamura Okoye Petrov Rossi Silva Tanaka Weber".split()
CITIES = "Lisbon Oslo Nairobi Kyoto Lima Vienna Toronto Cairo Mumbai Dublin Seoul Prague Boston Hanoi Athens".split()
ITEMS = "lamp chair keyboard notebook bicycle kettle jacket tent backpack monitor desk printer blanket camera speaker".split()
TABLES = {
    "customers": "id, name, email, city, created_at",
    "orders": "id, customer_id, total, status, ordered_on",
    "products": "id, name, price, stock, category",
    "employees": "id, name, salary, department_id, hired_on",
    "departments": "id, name, budget",
    "books": "id, title, author_id, year, pages",
    "authors": "id, name, country",
    "loans": "id, book_id, member_id, due_date, returned_on",
    "students": "id, name, birth_year, class_id",
    "grades": "student_id, course, grade, term",
    "flights": "id, origin, destination, departs_at, seats",
    "tickets": "id, flight_id, passenger, price",
}
LANGUAGES = "French German Spanish Italian Portuguese Dutch Swedish Polish".split()
SENTENCES = (
    "The train to {c} leaves at {h} and arrives before noon.",
    "{n} bought a new {i} for {m} euros yesterday.",
    "I would like to book a room for {d} nights, please.",
    "Could you tell me where the nearest pharmacy is?",
    "We are looking forward to seeing you in {c} next month.",
    "The {i} that {n} ordered has not arrived yet.",
    "Please send the documents to our office in {c} before Friday.",
    "My sister {n} works as a nurse in {c}.",
    "If it rains tomorrow, we will stay at home and read.",
    "The children were playing in the garden when the storm began.",
    "She has been learning to play the piano for {d} years.",
    "Our meeting with {n} was moved to {h} o'clock.",
    "This soup needs a little more salt.",
    "He forgot his {i} on the bus and had to go back.",
)
CODE_ASKS = (
    "Explain what this function does, step by step.",
    "Add a docstring and comments to this function. Return the complete code.",
    "Rename the variables so that they are easier to understand, and return the whole function.",
    "Write unit tests for this function with pytest.",
    "Are there any bugs or edge cases in this code? Answer briefly, then give an improved version.",
    "Add type hints to this function without changing what it does. Return only the code.",
    "Rewrite this function so that it is shorter.",
    "Translate this function to JavaScript.",
    "Repeat this code with consistent four-space indentation and no blank lines.",
)
PROGRAMS = (
    "a function that reverses the words of a sentence",
    "a class for a bank account",
    "a function that counts vowels",
    "a program that reads a CSV file and prints totals per column",
    "a stack with push and pop",
    "a function that checks for palindromes",
    "a command line to-do list",
    "a function that merges two sorted lists",
    "a quiz game",
    "a temperature converter",
    "a function that finds the most common word in a text",
    "a linked list",
    "a binary search tree with insert and search",
    "a rate limiter",
    "a simple web server with two routes",
    "a matrix multiplication",
    "a function that validates e-mail addresses",
    "a password generator",
    "the sieve of Eratosthenes",
    "a queue made of two stacks",
    "a tic-tac-toe board that prints itself",
    "a word frequency counter",
    "a retry decorator",
    "a function that flattens nested lists",
)
CODE_LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "Rust", "TypeScript", "Bash")


def library_pieces(limit: int) -> Iterator[tuple[str, str]]:
    """("code", source) and ("prose", docstring) pieces of moderate length from this interpreter's library."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, UnicodeDecodeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                text = ast.get_docstring(node) or ""
                if 250 < len(text) < limit:
                    yield "prose", text
            if isinstance(node, ast.FunctionDef):
                code = textwrap.dedent(ast.get_source_segment(source, node) or "")
                if 120 < len(code) < limit:
                    yield "code", code


class Builder:
    """Prompts of eight categories under one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        pieces = list(dict.fromkeys(library_pieces(1100)))
        self.code = [text for kind, text in pieces if kind == "code"]
        self.prose = [text for kind, text in pieces if kind == "prose"]
        self.topics = [t.strip() for t in TOPICS]

    def sentence(self) -> str:
        r = self.rng
        return r.choice(SENTENCES).format(
            c=r.choice(CITIES),
            n=r.choice(NAMES),
            i=r.choice(ITEMS),
            m=r.randint(5, 300),
            d=r.randint(2, 9),
            h=r.randint(1, 12),
        )

    def chat(self) -> str:
        r = self.rng
        t, u = r.sample(self.topics, 2)
        return r.choice(ASKS).format(t=t, u=u, w=r.choice(WHO), n=r.randint(3, 8))

    def code_(self) -> str:
        r = self.rng
        if r.random() < 0.5:
            return f"Write {r.choice(PROGRAMS)} in {r.choice(CODE_LANGUAGES)}." + r.choice(
                ("", " Add comments.", " Show an example of its use.")
            )
        return f"{r.choice(CODE_ASKS)}\n\n```python\n{r.choice(self.code)}\n```"

    def rows(self, n: int) -> list[dict[str, object]]:
        r = self.rng
        return [
            {
                "id": 100 + k,
                "name": f"{r.choice(NAMES)} {r.choice(SURNAMES)}",
                "city": r.choice(CITIES),
                "item": r.choice(ITEMS),
                "amount": round(r.uniform(5, 400), 2),
                "date": f"2024-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}",
            }
            for k in range(n)
        ]

    def editing(self) -> str:
        r = self.rng
        kind, rows = r.randrange(4), self.rows(r.randint(4, 9))
        if kind == 0:
            table = "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)])
            change = r.choice(
                (
                    "Sort the rows by date",
                    "Remove the column city",
                    "Write all cities in capital letters",
                    "Add a column currency with the value EUR",
                    "Round the amounts to whole numbers",
                )
            )
            return f"{change} and give me the whole CSV again.\n\n{table}"
        if kind == 1:
            change = r.choice(
                (
                    "Rename the key item to product",
                    'Add a key "paid": false to each object',
                    "Remove the key date",
                    'Change the key id to a string such as "A-100"',
                )
            )
            return f"{change}. Return the complete JSON.\n\n```json\n{json.dumps(rows[:5], indent=2)}\n```"
        if kind == 2:
            text = " ".join(self.sentence() for _ in range(r.randint(4, 8)))
            change = r.choice(
                (
                    "Make this text more formal",
                    "Rewrite this in the past tense",
                    "Correct mistakes and keep the wording",
                    "Put each sentence on its own line",
                    "Make this friendlier",
                )
            )
            return f"{change}:\n\n{text}"
        return f"Fix the grammar and spelling of this text, and change as little as you can:\n\n{r.choice(self.prose)}"

    def extraction(self) -> str:
        r = self.rng
        rows = self.rows(r.randint(3, 7))
        text = " ".join(
            r.choice(
                (
                    f"{x['name']} from {x['city']} ordered a {x['item']} on {x['date']} and paid {x['amount']} euros.",
                    f"On {x['date']} a {x['item']} was sent to {x['name']} in {x['city']} (price: {x['amount']}).",
                    f"{x['city']}: {x['name']} returned the {x['item']} bought for {x['amount']} on {x['date']}.",
                )
            )
            for x in rows
        )
        ask = r.choice(
            (
                "List all names and cities as a table.",
                "Extract every order as JSON with the keys name, city, item, amount and date.",
                "Which items are mentioned, and at what price? Answer as bullet points.",
                "Give me the dates only, one per line.",
                "Output one CSV line per person.",
            )
        )
        return f"{ask}\n\n{text}" if r.random() < 0.5 else f"{text}\n\n{ask}"

    def maths(self) -> str:
        r = self.rng
        a, b, c = r.randint(2, 60), r.randint(2, 40), r.randint(2, 12)
        name, item = r.choice(NAMES), r.choice(ITEMS)
        return r.choice(
            (
                f"{name} buys {c} {item}s for {a} euros each and pays with {a * c + b} euros. How much change is there? Show your steps.",
                f"Solve for x: {c}x + {b} = {a}. Explain each step.",
                f"A train travels {a * 10} km in {c} hours. What is its average speed? How long does it need for {b * 10} km?",
                f"What is {a} times {b}? Show how to work it out by hand.",
                f"Find the area and the perimeter of a rectangle with sides of {a} cm and {b} cm.",
                f"Write the first {c + 3} terms of the sequence that starts with {b} and adds {c} each time, and a formula for its n-th term.",
                f"{name} has {a} marbles and gives away 1/{c} of them. How many are left, rounded down? Explain.",
                f"What is the probability of drawing a red ball from a bag with {a} red and {b} blue balls? And two red balls in a row?",
                f"Differentiate f(x) = {c}x^3 - {a}x^2 + {b}x and find its stationary points.",
                f"Convert {a * 3} minutes to hours and minutes, and {b} miles to kilometres.",
                f"A price of {a * 5} euros rises by {c} % and then falls by {c} %. What is it now? Explain why it is not the old price.",
                f"Prove that the sum of two even numbers is even, with an example using {a * 2} and {b * 2}.",
            )
        )

    def sql(self) -> str:
        r = self.rng
        names = r.sample(list(TABLES), 2)
        schema = " and ".join(f"`{n}({TABLES[n]})`" for n in names)
        ask = r.choice(
            (
                "Write a query that joins both tables where that makes sense and counts rows per group.",
                "Write the CREATE TABLE statements with sensible types and keys.",
                "Write INSERT statements for five example rows in each table.",
                "Write three useful queries and explain each in one sentence.",
                "Which indexes would you add, and why? Give the statements.",
                "Write an UPDATE and a DELETE statement as examples, wrapped in a transaction.",
                "Find the five largest values and the rows they belong to.",
                "Write a view that summarises the data by month.",
            )
        )
        return f"Given the tables {schema}: {ask}"

    def summarisation(self) -> str:
        r = self.rng
        text = r.choice(self.prose) if r.random() < 0.5 else " ".join(self.sentence() for _ in range(r.randint(6, 10)))
        ask = r.choice(
            (
                "Summarise this in two sentences.",
                "What is this about? One short paragraph.",
                "Give me the three main points as bullets.",
                "Write a title and a one-line summary.",
                "Shorten this to half its length.",
                "Explain this to someone who has never programmed.",
            )
        )
        return f"{ask}\n\n{text}"

    def translation(self) -> str:
        r = self.rng
        lines = [self.sentence() for _ in range(r.randint(1, 6))]
        language = r.choice(LANGUAGES)
        if r.random() < 0.5:
            return f"Translate into {language}:\n\n" + " ".join(lines)
        return f"For each line give the English, then the {language} translation:\n\n" + "\n".join(
            f"- {line}" for line in lines
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write prompts for `python -m assc distill --workload OUT`.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    builder = Builder(options.seed)
    makers: dict[str, Callable[[], str]] = {
        "chat": builder.chat,
        "code": builder.code_,
        "editing": builder.editing,
        "extraction": builder.extraction,
        "maths": builder.maths,
        "sql": builder.sql,
        "summarisation": builder.summarisation,
        "translation": builder.translation,
    }
    seen: set[str] = set()
    lines: list[str] = []
    while len(lines) < options.prompts:
        category = list(makers)[len(lines) % len(makers)]
        prompt = makers[category]()
        if prompt not in seen:
            seen.add(prompt)
            lines.append(
                json.dumps(
                    {"id": f"{category}-{len(lines):05d}", "category": category, "prompt": prompt, "split": "draft"}
                )
            )
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts: {options.out}")


if __name__ == "__main__":
    main()
