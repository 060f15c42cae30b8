"use strict";
const MOST = 12, AROUND = 60;
const field = document.querySelector("[type=search]"), found = document.getElementById("found");
let loading, entries = [];

/** Load the words of all pages, when they are first needed: a script, since pages from a disk may not fetch. */
function load() {
  loading ??= new Promise((done) => {
    const script = document.createElement("script");
    script.src = "search.js";
    script.addEventListener("load", () => {
      entries = SECTIONS.map(([address, title, text]) => ({address, title, text}));
      done();
    });
    document.head.append(script);
  });
  return loading;
}

/** Small letters, and all-reduce is allreduce. */
const simplify = (text) => text.toLowerCase().replaceAll("-", "");
const split = (text) => simplify(text).split(/[^\p{L}\p{N}_]+/u).filter(Boolean);

const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);

const OF_WORDS = "[\\p{L}\\p{N}_]", ENDING = "(?:e?s|ed?|er|ing|ly|ence|ent)?";

/** What a word of the reader finds: one that names a symptom, whole words with any ending; any other, beginnings of words. */
function patternOf(word) {
  const isNamed = (name) => new RegExp(`^${name}${ENDING}$`, "u").test(word);
  const stem = SYMPTOMS.flatMap(([names]) => names).find(isNamed);
  return new RegExp(`(?<!${OF_WORDS})${stem ? `${stem}${ENDING}(?!${OF_WORDS})` : word}`, "gu");
}

/** How well a section has each of these words: a title weighs more than the text; 0 where it has it not. */
function weigh({title, text}, words, patterns) {
  const inTitle = split(title), simpleTitle = simplify(title), simpleText = simplify(text);
  return words.map((word, index) => inTitle.includes(word) ? 20 : simpleTitle.match(patterns[index]) ? 8
    : Math.min(5, simpleText.match(patterns[index])?.length ?? 0));
}

/** The sections with these words, the best first: with most of the words, of which one that few sections have counts more;
 * then by weight, and a short title before a long one. A word that no section has is left out. */
function rank(words) {
  const patterns = words.map(patternOf), weights = entries.map((section) => weigh(section, words, patterns));
  const rarity = words.map((_, index) => Math.log(1 + entries.length / (1 + weights.filter((each) => each[index]).length)));
  const ranked = entries.map((section, at) => ({section, found: sum(rarity.filter((_, index) => weights[at][index])),
    weight: sum(weights[at]) + 1 / split(section.title).length}));
  return ranked.filter((each) => each.found).sort((a, b) => b.found - a.found || b.weight - a.weight).map((each) => each.section);
}

/** The sections on what a reader sees go wrong, where a word names that: each with where its answer begins, and the word. */
function findSymptoms(words) {
  const answers = new Map();
  for (const [names, places] of SYMPTOMS) {
    const word = words.find((each) => names.some((name) => each.match(`^${name}${ENDING}$`)));
    if (word) for (const [place, from] of places) if (!answers.has(entries[place])) answers.set(entries[place], {from, word});
  }
  return answers;
}

/** Where in a text the first of these words is that it has; -1 if it has none. */
function findWord(text, words) {
  const kept = Array.from(text, (_, at) => at).filter((at) => text[at] !== "-");
  const found = words.map((word) => simplify(text).search(patternOf(word))).find((at) => at >= 0);
  return found === undefined ? -1 : kept[found];
}

/** `answer`: of a section on a symptom, where in its text what to do begins. */
function show({address, title, text}, words, answer) {
  const item = document.createElement("li"), link = document.createElement("a"), near = document.createElement("p");
  const at = answer?.from ?? Math.max(0, findWord(text, words) - AROUND), excerpt = text.slice(at, at + 3 * AROUND);
  link.href = address;
  link.textContent = title;
  const isNamed = !answer || findWord(excerpt, [answer.word]) >= 0;
  near.textContent = `${isNamed ? "" : `${answer.word}: `}${at ? "…" : ""}${excerpt}…`;
  item.append(link, near);
  return item;
}

async function search() {
  await load();
  const words = split(field.value), list = document.createElement("ol");
  const answers = findSymptoms(words), best = [...new Set([...answers.keys(), ...rank(words)])].slice(0, MOST);
  list.append(...best.map((section) => show(section, words, answers.get(section))));
  found.replaceChildren(best.length ? list : `Nothing found for “${field.value}”.`);
  found.hidden = !words.length;
}

field.addEventListener("focus", load);
field.addEventListener("input", search);
field.form.addEventListener("submit", (event) => {
  event.preventDefault();
  found.querySelector("a")?.click();
});
found.addEventListener("click", (event) => { if (event.target.closest("a")) found.hidden = true; });
document.addEventListener("keydown", (event) => {
  const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  if (event.key === "/" && !isTyping) { event.preventDefault(); field.focus(); }
  if (event.key !== "Escape") return;
  if (!found.hidden || contents.classList.contains("shown")) (found.hidden ? menu : field).focus();
  found.hidden = true;
  showContents(false);
});

/** A button of a class, with a text. */
function makeButton(kind, text, press) {
  const button = document.createElement("button");
  button.className = kind;
  button.textContent = text;
  button.addEventListener("click", press);
  return button;
}

// The contents: a column, or on a narrow screen a drawer.
const menu = document.querySelector(".menu"), contents = document.getElementById("contents");
function showContents(isShown) {
  contents.classList.toggle("shown", isShown);
  menu.setAttribute("aria-expanded", isShown);
  if (isShown) showPlace();
}
menu.addEventListener("click", () => showContents(menu.getAttribute("aria-expanded") === "false"));
contents.addEventListener("click", (event) => { if (event.target.closest("a")) showContents(false); });

/** Scroll the contents, and not the page, to where the reader is. */
function showPlace() {
  const here = contents.querySelector("[aria-current]");
  if (here) contents.scrollTop += here.getBoundingClientRect().top - contents.getBoundingClientRect().top - contents.clientHeight / 3;
}
showPlace();

/** Mark in the contents the section that is being read. */
const sections = [...contents.querySelectorAll('a[href^="#"]')].map((link) => [link, document.getElementById(link.hash.slice(1))]);
function followSections() {
  const begun = sections.filter(([, heading]) => heading.getBoundingClientRect().top < innerHeight / 3).at(-1);
  for (const [link] of sections) if (link === begun?.[0]) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
}
addEventListener("scroll", followSections, {passive: true});
followSections();

// The board: beside the text, or on a narrow screen below it.
const root = document.documentElement, board = document.getElementById("board"), boardButton = document.querySelector(".board");
const isBeside = matchMedia("(min-width: 1250px)");
/** Show it or not, and leave the element that is being read where it is. */
function showBoard(isShown, read) {
  const from = read?.getBoundingClientRect().top ?? 0;
  root.dataset.board = isShown ? "open" : "closed";
  boardButton.setAttribute("aria-expanded", isShown);
  if (read && isBeside.matches) scrollBy({top: read.getBoundingClientRect().top - from, behavior: "instant"});
}
/** Show a line of the board, though the board is closed. Beside the text it is scrolled, and the text is not. */
function showLine(line, read) {
  if (!line.checkVisibility()) showBoard(true, read);
  for (const each of board.querySelectorAll(".here")) each.classList.remove("here");
  line.classList.add("here");
  const code = line.closest("pre");
  if (isBeside.matches) code.scrollTop = line.offsetTop - code.clientHeight / 3; else line.scrollIntoView();
}
/** The line of the board that this address on this page names, if it does. */
function lineAt(hash) {
  const line = document.getElementById(decodeURIComponent(hash.slice(1)));
  return board.contains(line) ? line : null;
}
if (board) {
  showBoard(root.dataset.board ? root.dataset.board === "open" : matchMedia("(min-width: 1600px)").matches);
  boardButton.addEventListener("click", () => {
    showBoard(root.dataset.board !== "open", [...document.querySelector("main").children].find((each) => each.getBoundingClientRect().bottom > innerHeight / 3));
    settings.write("board", root.dataset.board);
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href]"), line = link && link.pathname === location.pathname && link.hash && lineAt(link.hash);
    if (!line || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    history.pushState(null, "", link.hash);
    showLine(line, link);
  });
  const follow = () => { const line = lineAt(location.hash); if (line) showLine(line); };
  addEventListener("hashchange", follow);
  follow();
}

// Colours: as the system has them, light, or dark.
const THEMES = ["", "light", "dark"], theme = document.querySelector(".theme");
function showTheme(name) {
  if (name) root.dataset.theme = name; else delete root.dataset.theme;
  const said = {light: "Light", dark: "Dark"}[name] ?? "Auto";
  theme.textContent = `◐ ${said}`;
  theme.setAttribute("aria-label", `Colours: ${said}`);
}
theme.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "") + 1) % THEMES.length];
  settings.write("theme", next);
  showTheme(next);
});
showTheme(root.dataset.theme ?? "");

// Code: a button to copy it, only the commands where they are marked, and on a narrow screen one to show all of it.
const COPY = '<svg viewBox="0 0 16 16" aria-hidden="true"><path d="M5 5h9v9H5zM11 5V2H2v9h3"/></svg>', LONG = 14;
for (const block of document.querySelectorAll(".code")) {
  const code = block.querySelector("code"), commands = [...code.querySelectorAll("b")].map((each) => each.textContent.slice(2));
  const copy = makeButton("copy", "", async () => {
    try {
      await navigator.clipboard.writeText(commands.length ? commands.join("\n") : code.textContent);
      copy.setAttribute("aria-label", "Copied");
      copy.textContent = "✓";
    } catch {  // no clipboard here, or no leave to use it
      getSelection().selectAllChildren(code);
    }
  });
  copy.setAttribute("aria-label", commands.length ? "Copy the commands" : "Copy the code");
  copy.innerHTML = COPY;
  if (!block.querySelector("[aria-label=text]")) block.append(copy);  // what is printed, and diagrams, nobody types
  const lines = code.textContent.trimEnd().split("\n").length;
  if (lines <= LONG || block.querySelector(".lines")) continue;
  const more = makeButton("more", `Show all ${lines} lines`, () => {
    block.querySelector("pre").focus();
    more.remove();
    block.classList.remove("long");
  });
  block.classList.add("long");
  block.after(more);
}

/** A figure is a picture until it can be played, and on paper; on a narrow screen, until the reader plays it. */
for (const picture of document.querySelectorAll(".drawn")) {
  const player = picture.parentElement.querySelector(".player"), isNarrow = matchMedia("(max-width: 640px)").matches;
  const begin = makeButton("begin-play", "Play this run", () => {
    player.classList.add("shown");
    begin.remove();
    picture.open = false;
    player.querySelector("[name=play]").focus();
  });
  picture.open = isNarrow;
  picture.before(begin);
  addEventListener("beforeprint", () => { picture.open = true; });
}

// What has been read and solved, and where to go on.
const done = new Set(settings.read("done")), boxes = [...document.querySelectorAll(".progress")];
/** The page, or the exercise on it, that a link leads to. */
const nameOf = (link) => /^#exercise-/.test(link.hash) ? link.hash.slice(1) : link.pathname.split("/").pop().replace(".html", "");
const chapters = [...contents.querySelectorAll("ol > li > a")].map(nameOf), page = nameOf(location);
function showProgress() {
  for (const link of document.querySelectorAll("nav a, main li a")) link.classList.toggle("done", done.has(nameOf(link)));
  const count = chapters.filter((each) => done.has(each)).length;
  for (const box of boxes) {
    const isExercise = box.dataset.done.startsWith("exercise-");
    box.querySelector("span").textContent = isExercise ? "Passed" : `I have read this chapter (${count} of ${chapters.length})`;
    box.querySelector("input").checked = done.has(box.dataset.done);
    box.hidden = false;
  }
}
for (const box of boxes) {
  box.addEventListener("change", ({target}) => {
    if (target.checked) done.add(box.dataset.done); else done.delete(box.dataset.done);
    settings.write("done", [...done]);
    showProgress();
  });
}
showProgress();
const last = settings.read("last");
if (chapters.includes(page)) settings.write("last", page);
if (last && last !== page) Object.assign(document.querySelector(".begin"), {href: `${last}.html`, textContent: `Go on: ${last}`});
