"""The game of wordle.toml. `python configs/recipes/wordle.py > words.jsonl` writes its prompts."""

import json
import random
import re

NUM_GAMES = 5000
PROMPT = (
    "Find the word of five letters in six guesses. Write each guess as <guess>crane</guess>. After each you read a "
    "mark for every letter: G is right, Y is in the word at another place, X is not in the word."
)
_TEXT = (
    "about above actor adult after again agent alarm album alert alone among angle apple arena beach begin birth black "
    "blame blind block blood board brain bread break brick bring brown build cabin chain chair chart chest child china "
    "claim class clean clear climb clock cloud coach coast count court cover craft crane crash cream crime crowd crown "
    "dance death depth dream dress drink drive earth enemy entry error event faith field fight flame flesh floor focus "
    "force frame fresh front fruit giant glass globe grace grain grant grass green group guard guest guide heart heavy "
    "horse hotel house human image index jewel judge juice knife label large laugh layer learn level light limit lunch "
    "magic major march match metal model money month motor mouth movie music night noise north novel nurse ocean offer "
    "order paint panel paper party peace phase phone piece pilot pitch place plane plant plate point pound power press "
    "price pride prize proof queen radio range river robot rough round route royal scale scene scope score sense shape "
    "share sheet shelf shell shift shirt shock shore skill sleep slide smile smoke snake solid sound south space speed "
    "spine sport staff stage stair stake steam steel stick stone storm story style sugar table taste teach thing tiger "
    "title total touch tower track trade train trial tribe truck trust truth uncle union value video visit voice waste "
    "watch water wheel white whole woman world worth wound youth"
)
WORDS = _TEXT.split()


class Wordle:
    """One game. It lasts until the word is found, or as many turns as `environment.max_turns` allows."""

    def reset(self, seed: int) -> None:
        """Choose a word; the prompt does not tell it."""
        self.word = random.Random(seed).choice(WORDS)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Return what the policy reads next, the reward of its guess, and whether the game is over."""
        found = re.findall(r"<guess>\s*([a-zA-Z]{5})\s*</guess>", text)
        if not found:
            return "Write a word of five letters as <guess>crane</guess>.", 0.0, False
        guess = found[-1].lower()
        if guess == self.word:
            return None, 1.0, True
        return f"{guess}: {marks(guess, self.word)}", 0.0, False


def marks(guess: str, word: str) -> str:
    """Return G, Y or X for each letter; a letter of the word is counted once."""
    left = [letter for letter, there in zip(guess, word, strict=True) if letter != there]
    missing = [there for letter, there in zip(guess, word, strict=True) if letter != there]
    shown = []
    for letter, there in zip(guess, word, strict=True):
        if letter == there:
            shown.append("G")
        elif letter in left and letter in missing:
            missing.remove(letter)
            shown.append("Y")
        else:
            shown.append("X")
    return "".join(shown)


if __name__ == "__main__":
    for number in range(NUM_GAMES):
        print(json.dumps({"prompt": f"{PROMPT} This is game {number}.", "answer": ""}))
