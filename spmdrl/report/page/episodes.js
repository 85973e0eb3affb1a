
"use strict";
// Every text reaches the page as the content of a text node; no text is ever read as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const WRITERS = { p: "prompt", e: "environment" };
const WRITER_NAMES = { prompt: "prompt or template", environment: "environment", policy: "policy" };
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u00a0\u00ad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufe00-\ufe0f\ufeff\ufff9-\ufffb]/;
const tip = document.getElementById("tip");
const facts = new WeakMap(); // of each token's element

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function short(number) {
  return number === null ? "not finite" : Number(number.toPrecision(4)).toString();
}

// White space and control characters as something that can be seen; what is copied is the text itself.
function visible(text) {
  const nodes = [];
  let plain = "";
  const flush = () => { if (plain) nodes.push(plain); plain = ""; };
  for (const character of text) {
    if (character === " ") {
      flush();
      nodes.push(make("span", "space", " "));
    } else if (character === "\n") {
      flush();
      nodes.push(make("span", "mark", "↵"), "\n");
    } else if (character === "\t") {
      flush();
      nodes.push(make("span", "mark", "⇥"), "\t");
    } else if (INVISIBLE.test(character)) {
      flush();
      nodes.push(make("span", "code", codePoint(character)));
    } else {
      plain += character;
    }
  }
  flush();
  return nodes;
}

function codePoint(character) {
  return "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

// A text in one line, for the tooltip.
function quoted(text) {
  if (text === "") return "(rest of the character before)";
  const escaped = [...JSON.stringify(text)].map((c) => (c !== " " && INVISIBLE.test(c) ? codePoint(c) : c));
  return escaped.join("");
}

// 1 to 5 for the colour of a value in nats.
function level(nats, edges) {
  return edges.filter((edge) => nats >= edge).length;
}

function heat(token) {
  const view = document.body.dataset.view;
  if (view === "surprise" && token.logprob !== undefined) {
    const step = token.logprob === null ? 5 : level(-token.logprob, [0.1, 0.5, 1, 2, 4]);
    return step ? ["hot", `h${step}`] : [];
  }
  if (view === "mismatch" && typeof token.mismatch === "number") {
    const step = level(Math.abs(token.mismatch), [1e-6, 1e-4, 1e-3, 1e-2, 1e-1]);
    return step ? [token.mismatch > 0 ? "hot" : "cold", `h${step}`] : [];
  }
  return [];
}

function tokenElement(token) {
  const element = make("span", `t ${token.writer}`);
  if (token.special) element.classList.add("special");
  if (token.writer === "policy" && !token.trained) element.classList.add("untrained");
  element.classList.add(...heat(token));
  element.append(...(token.text === "" ? [make("span", "mark", "⋯")] : visible(token.text)));
  element.tabIndex = -1;
  facts.set(element, token);
  return element;
}

function* contextTokens(context) {
  const special = new Set(context.special);
  for (const [place, id] of context.ids.entries()) {
    yield { id, text: data.strings[context.pieces[place]], special: special.has(place),
            writer: WRITERS[context.writers[place]] };
  }
}

function* responseTokens(response, trained) {
  const special = new Set(response.special);
  const versions = response.spans.flatMap(([version, number]) => Array(number).fill(version));
  for (const [place, id] of response.ids.entries()) {
    yield { id, text: data.strings[response.pieces[place]], special: special.has(place), writer: "policy", trained,
            logprob: response.logprobs[place], mismatch: response.mismatch[place], version: versions[place] };
  }
}

function part(name, tokens) {
  const line = make("div", "tokens");
  for (const token of tokens) line.append(tokenElement(token));
  return make("div", "part", make("h4", "", name), line);
}

function turnElement(turn, number, trained) {
  const seen = turn.observation;
  const head = make("div", "head", make("h3", "", `Turn ${number}`),
    make("span", "facts", `${count(turn.context.ids.length, "token")} read, ${turn.response.ids.length} written`),
    make("span", "facts", `finish: ${turn.finish_reason}`));
  if (seen) head.append(make("span", seen.reward > 0 ? "good" : "facts", `reward ${short(seen.reward)}`));
  if (seen && seen.tool_errors) head.append(make("span", "bad", count(seen.tool_errors, "tool error")));
  if (seen && seen.done) head.append(make("span", "facts", "done"));
  if (!trained) head.append(make("span", "bad", "not trained on"));
  const element = make("section", "turn", head, part("read", contextTokens(turn.context)),
    part("wrote", responseTokens(turn.response, trained)));
  const calls = turn.tool_calls.map((call) =>
    make("div", "call", make("b", "", ...visible(call.name)), " ", ...visible(call.arguments)));
  if (turn.malformed !== null) calls.push(make("div", "call bad", ...visible(turn.malformed)));
  if (calls.length) {
    element.append(make("div", "part", make("h4", "", turn.malformed === null ? "called" : "malformed"),
      make("div", "calls", ...calls)));
  }
  const metrics = seen ? Object.entries(seen.metrics) : [];
  if (metrics.length) {
    element.append(make("div", "part", make("h4", "", "metrics"),
      make("div", "call", metrics.map(([name, value]) => `${name} ${short(value)}`).join("   "))));
  }
  return element;
}

function swatch(className, words) {
  return make("span", "", make("span", `swatch ${className}`), words);
}

function legend(rollout) {
  const view = document.body.dataset.view;
  if (view === "surprise") {
    return make("div", "legend", make("span", "", "log-probability in nats:"),
      ...[0.1, 0.5, 1, 2, 4].map((edge, i) => swatch(`hot h${i + 1}`, `≤ −${edge}`)));
  }
  if (view === "mismatch") {
    return make("div", "legend", make("span", "", "trainer minus engine, in nats, by size:"),
      ...["10⁻⁶", "10⁻⁴", "10⁻³", "10⁻²", "10⁻¹"].map((edge, i) => swatch(`hot h${i + 1}`, `≥ ${edge}`)),
      swatch("cold h3", "blue where negative"));
  }
  const numbers = { prompt: 0, environment: 0, policy: 0 };
  for (const turn of rollout.trajectories.flat()) {
    for (const letter of turn.context.writers) numbers[WRITERS[letter]] += 1;
    numbers.policy += turn.response.ids.length;
  }
  return make("div", "legend",
    swatch("prompt", `prompt and template ${numbers.prompt}`),
    swatch("environment", `environment ${numbers.environment}`),
    rollout.is_trained ? swatch("policy", `policy ${numbers.policy}`)
      : swatch("untrained", `policy, not trained on ${numbers.policy}`));
}

function show(group, rollout) {
  const inside = make("div", "inside");
  const name = rollout.is_baseline ? "greedy baseline" : `sample ${rollout.sample_index}`;
  inside.append(make("div", "about", make("h2", "", `Prompt ${group.prompt_id}, ${name}`),
    make("span", rollout.reward > 0 ? "good" : "facts", `reward ${short(rollout.reward)}`),
    ...Object.entries(rollout.reward_parts).map(([part, value]) => make("span", "facts", `${part} ${short(value)}`)),
    make("span", "facts", `end: ${rollout.end}`),
    group.answer === null ? null : make("span", "facts", "answer: ", ...visible(group.answer)),
    make("span", "facts", `seed ${rollout.seed}`)));
  inside.append(legend(rollout));
  for (const failure of [rollout.reward_failure, rollout.environment_failure]) {
    if (failure !== null) inside.append(make("p", "note", ...visible(failure)));
  }
  let number = 0;
  rollout.trajectories.forEach((turns, place) => {
    if (place) {
      inside.append(make("hr", "parting"),
        make("p", "facts", "The template rewrote what came before: a new sequence of the same episode begins."));
    }
    for (const turn of turns) inside.append(turnElement(turn, (number += 1), rollout.is_trained));
  });
  const first = inside.querySelector(".t");
  if (first) first.tabIndex = 0;
  hideTip();
  document.getElementById("episode").replaceChildren(inside);
}

function showTip(element) {
  const token = facts.get(element);
  const rows = [["text", quoted(token.text)], ["token", token.id + (token.special ? ", special" : "")],
                ["written by", WRITER_NAMES[token.writer]]];
  if (token.writer === "policy") {
    rows.push(["log-probability", token.logprob === null ? "not finite" : `${token.logprob} nats`],
      ["mismatch", typeof token.mismatch === "number" ? `${short(token.mismatch)} nats` : "not known"],
      ["version", token.version === undefined ? "not known" : token.version]);
    if (!token.trained) rows.push(["", "not trained on"]);
  }
  tip.replaceChildren(...rows.flatMap(([name, value]) =>
    [make("dt", "", name), make("dd", name === "text" ? "text" : "", String(value))]));
  tip.hidden = false;
  const at = element.getClientRects()[0], size = tip.getBoundingClientRect();
  const below = at.bottom + 8 + size.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - size.height - 8)}px`;
}

function hideTip() {
  tip.hidden = true;
}

const buttons = new Map(); // by what stands behind # in the address

function addressOf(group, rollout) {
  return `${group.prompt_id}-${rollout.sample_index}`;
}

function listButton(group, rollout) {
  const turns = rollout.trajectories.flat().length;
  const button = make("button", "rollout",
    make("span", "number", rollout.is_baseline ? "⌀" : `#${rollout.sample_index}`),
    make("span", "", rollout.end),
    make("span", rollout.reward > 0 ? "reward good" : "reward", short(rollout.reward)),
    make("span", "more", [count(turns, "turn"), count(rollout.num_sampled, "token"),
      ...(rollout.is_baseline ? ["greedy"] : rollout.is_trained ? [] : ["not trained"])].join(" · ")));
  button.type = "button";
  button.addEventListener("click", () => { location.hash = addressOf(group, rollout); });
  buttons.set(addressOf(group, rollout), { button, group, rollout });
  return button;
}

function route() {
  const wanted = buttons.get(location.hash.slice(1)) ?? buttons.values().next().value;
  for (const { button } of buttons.values()) button.removeAttribute("aria-current");
  wanted.button.setAttribute("aria-current", "true");
  wanted.button.scrollIntoView({ block: "nearest" });
  show(wanted.group, wanted.rollout);
}

function moveFocus(event) {
  const tokens = [...document.querySelectorAll(".t")];
  const place = tokens.indexOf(document.activeElement);
  const to = tokens[place + { ArrowRight: 1, ArrowLeft: -1 }[event.key]];
  if (place < 0 || !to) return;
  event.preventDefault();
  to.focus();
}

function start() {
  document.getElementById("title").textContent = `${data.run} · step ${data.step}`;
  const rollouts = data.groups.flatMap((group) => group.rollouts);
  document.getElementById("summary").textContent = [count(data.groups.length, "prompt"),
    count(rollouts.length, "episode"),
    count(rollouts.reduce((sum, rollout) => sum + rollout.num_sampled, 0), "sampled token")].join(" · ");
  document.getElementById("by-mismatch").hidden = !data.shows_mismatch;
  document.getElementById("list").append(...data.groups.map((group) => make("section", "group",
    make("p", "", make("b", "", `Prompt ${group.prompt_id}`), ` ${group.task}`),
    make("p", "", group.prompt.slice(0, 200)),
    ...group.rollouts.map((rollout) => listButton(group, rollout)))));

  document.body.dataset.view = "writer";
  document.getElementById("view").addEventListener("change", (event) => {
    document.body.dataset.view = event.target.value;
    document.body.className = `by-${event.target.value}`;
    route();
  });
  const main = document.getElementById("episode");
  for (const kind of ["mouseover", "focusin"]) {
    main.addEventListener(kind, (event) => {
      const element = event.target.closest(".t");
      if (element) showTip(element);
      else hideTip();
    });
  }
  for (const kind of ["mouseleave", "scroll", "focusout"]) main.addEventListener(kind, hideTip);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") moveFocus(event);
  });
  addEventListener("hashchange", route);
  route();
}

start();
