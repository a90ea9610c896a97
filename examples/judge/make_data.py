"""Write prompts without answers to data/train.jsonl, and held-out ones to data/test.jsonl."""

import json
import random
from pathlib import Path

THINGS = (
    "hotel, train, film, book, soup, phone, garden, song, bike, museum, shop, pizza, teacher, "
    "beach, game, hat, chair, bus, cafe, lamp, market, party, shoe, tea, play, zoo, car, cake, "
    "park, coat, boat, desk"
).split(", ")
ADJECTIVES = "new, old, small, big, red, famous, cheap, local".split(", ")


def main() -> None:
    topics = [f"{adjective} {thing}" for adjective in ADJECTIVES for thing in THINGS]
    random.Random(0).shuffle(topics)
    Path("data").mkdir(exist_ok=True)
    for name, some in ("test", topics[:64]), ("train", topics[64:]):
        rows = [{"question": f"Write one sentence about a {topic}."} for topic in some]
        Path(f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
