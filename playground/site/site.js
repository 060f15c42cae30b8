"use strict";
const MOST = 12, AROUND = 60;
const field = document.querySelector("[type=search]"), found = document.getElementById("found");
let loading;

/** Load the words of all pages, when they are first needed: a script, since pages from a disk may not fetch. */
function load() {
  loading ??= new Promise((done) => {
    const script = document.createElement("script");
    script.src = "search.js";
    script.addEventListener("load", done);
    document.head.append(script);
  });
  return loading;
}

/** Small letters, and all-reduce is allreduce. */
const simplify = (text) => text.toLowerCase().replaceAll("-", "");
const split = (text) => simplify(text).split(/[^\p{L}\p{N}_]+/u).filter(Boolean);

/** How well a section has all of these words: a title weighs more than the text, a short one more than a long one; 0 if a word is missing. */
function weigh([, title, text], words) {
  const inTitle = split(title), inText = simplify(text);
  const weights = words.map((word) => inTitle.includes(word) ? 20 : inTitle.some((each) => each.startsWith(word)) ? 8
    : inText.includes(` ${word}`) || inText.startsWith(word) ? Math.min(5, inText.split(word).length - 1) : 0);
  return weights.every(Boolean) ? weights.reduce((sum, each) => sum + each, 1 / inTitle.length) : 0;
}

function show([address, title, text], words) {
  const item = document.createElement("li"), link = document.createElement("a"), near = document.createElement("p");
  const at = Math.max(0, simplify(text).indexOf(words[0]) - AROUND);
  link.href = address;
  link.textContent = title;
  near.textContent = `${at ? "…" : ""}${text.slice(at, at + 3 * AROUND)}…`;
  item.append(link, near);
  return item;
}

async function search() {
  await load();
  const words = split(field.value), list = document.createElement("ol"), weights = new Map();
  for (const section of SECTIONS) if (words.length && weigh(section, words)) weights.set(section, weigh(section, words));
  const best = [...weights.keys()].sort((a, b) => weights.get(b) - weights.get(a)).slice(0, MOST);
  list.append(...best.map((section) => show(section, words)));
  found.replaceChildren(best.length ? list : `Nothing found for “${field.value}”.`);
  found.hidden = !words.length;
}

field.addEventListener("focus", load);
field.addEventListener("input", search);
field.form.addEventListener("submit", (event) => {
  event.preventDefault();
  found.querySelector("a")?.click();
});
document.addEventListener("keydown", (event) => {
  const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  if (event.key === "/" && !isTyping) { event.preventDefault(); field.focus(); }
  if (event.key === "Escape") { field.value = ""; found.hidden = true; document.querySelector(".contents").open = false; }
});

for (const place of document.querySelectorAll(".copied")) {
  const button = document.createElement("button"), code = place.querySelector("code");
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(code);
    await navigator.clipboard?.writeText(code.textContent);
    button.textContent = navigator.clipboard ? "Copied" : "Selected";
  });
  place.prepend(button);
}

/** A figure is a picture until it can be played, and on paper. */
for (const picture of document.querySelectorAll(".drawn")) {
  picture.open = false;
  addEventListener("beforeprint", () => { picture.open = true; });
}
