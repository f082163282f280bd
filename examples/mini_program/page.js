"use strict";

const $ = (id) => document.getElementById(id);
const feed = $("feed");
let about = { agents: [], preview: "", examples: [] };
let shownFile = "index.html";
let isBusy = false;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

async function send(path, body) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Mini-Program": "1" },
    body: JSON.stringify(body ?? {}),
  });
  if (!answer.ok) show({ kind: "failed", text: (await answer.json()).error });
}

// --- the conversation ---

function add(node) {
  const isAtEnd = feed.scrollHeight - feed.scrollTop - feed.clientHeight < 60;
  $("welcome").hidden = true;
  feed.insertBefore(node, feed.querySelector(".busy"));
  if (isAtEnd) feed.scrollTop = feed.scrollHeight;
}

function setBusy(agent) {
  isBusy = agent !== null;
  feed.querySelector(".busy")?.remove();
  if (isBusy) feed.append(element("div", "busy", `${agent} is at work`));
  $("send").textContent = isBusy ? "Stop" : "Build";
  $("send").classList.toggle("primary", !isBusy);
  $("clear").disabled = isBusy;
}

function toolCall(entry) {
  const call = element("details", entry.is_error ? "call bad" : "call");
  const head = element("summary");
  head.append(element("span", "", entry.name.replaceAll("_", " ")), element("code", "", entry.target));
  call.append(head, element("pre", "", entry.result));
  return call;
}

function verdict(entry) {
  const errors = entry.problems.filter((one) => one.severity === "error").length;
  const reported = (entry.report.errors ?? []).length;
  const count = errors + reported;
  if (count) return element("div", "verdict bad", count === 1 ? "1 problem" : `${count} problems`);
  if (!entry.report.browser) return element("div", "verdict warn", "valid; no browser ran it");
  return element("div", "verdict", `valid, and no errors in ${entry.report.browser}`);
}

const SHOW = {
  user: (entry) => add(element("div", "said user", entry.text)),
  agent: (entry) => add(element("div", "said agent", entry.text)),
  failed: (entry) => add(element("div", "said failed", entry.text)),
  tool: (entry) => {
    add(toolCall(entry));
    if (!entry.is_error && /write|delete|move/.test(entry.name)) reloadSoon();
  },
  busy: (entry) => setBusy(entry.agent),
  idle: () => setBusy(null),
  files: (entry) => showFiles(entry.files),
  unchecked: (entry) => add(element("div", "verdict warn", entry.text)),
  checked: (entry) => {
    add(verdict(entry));
    showProblems(entry.problems, entry.report);
    reloadSoon();
  },
  cleared: () => {
    feed.querySelectorAll(".said, .call, .verdict").forEach((node) => node.remove());
    $("welcome").hidden = false;
    shownFile = "index.html";
    showFiles([]);
  },
};

function show(entry) {
  SHOW[entry.kind]?.(entry);
}

// --- the application ---

let timer = 0;

function reloadSoon() {
  clearTimeout(timer);
  timer = setTimeout(() => {
    $("preview").src = `${about.preview}/?${Date.now()}`;
    $("preview").hidden = false;
    $("nothing").hidden = true;
  }, 150);
}

function showFiles(files) {
  $("file-count").textContent = files.length;
  $("file-count").hidden = !files.length;
  $("open").hidden = !files.length;
  if (!files.length) {
    clearTimeout(timer);
    $("preview").hidden = true;
    $("preview").removeAttribute("src");
    $("nothing").hidden = false;
    $("source").textContent = "";
    showProblems([], { note: "Nothing has been checked: the application has no files." });
  }
  $("files").replaceChildren(
    ...files.map((file) => {
      const item = element("li");
      const button = element("button", "", file.path);
      const size = file.size_bytes < 1000 ? `${file.size_bytes} B` : `${(file.size_bytes / 1000).toFixed(1)} kB`;
      button.append(element("span", "quiet size", size));
      button.dataset.path = file.path;
      button.addEventListener("click", () => showFile(file.path));
      item.append(button);
      return item;
    }),
  );
  const names = files.map((file) => file.path);
  if (names.length) showFile(names.includes(shownFile) ? shownFile : names[0]);
}

async function showFile(path) {
  shownFile = path;
  for (const button of $("files").querySelectorAll("button"))
    button.setAttribute("aria-current", button.dataset.path === path);
  const answer = await fetch(`file?path=${encodeURIComponent(path)}`);
  if (shownFile === path) $("source").textContent = (await answer.json()).text;
}

function showProblems(problems, report) {
  const rows = [
    ...problems.map((one) => ({ ...one, kind: one.severity, text: one.message })),
    ...(report.errors ?? []),
    ...(report.console ?? []),
  ];
  const errors = rows.filter((row) => /error|exception|request/.test(row.kind)).length;
  $("problem-count").textContent = errors || rows.length;
  $("problem-count").hidden = !rows.length;
  $("problem-count").classList.toggle("bad", errors > 0);
  const shown = rows.map((row) => {
    const made = element("div", "row");
    made.append(element("span", `kind ${row.kind}`, row.kind), element("span", "text", row.text));
    if (row.file) made.append(element("span", "place", `${row.file}:${row.line}:${row.column}`));
    return made;
  });
  if (report.note) shown.unshift(element("div", "fine", report.note));
  else if (!shown.length) shown.push(element("div", "fine", "No problems: neither in the files nor in the browser's console."));
  $("problems-panel").replaceChildren(...shown);
}

// --- controls ---

const tabs = [...document.querySelectorAll("[role=tab]")];

function choose(tab) {
  for (const one of tabs) {
    one.setAttribute("aria-selected", one === tab);
    one.tabIndex = one === tab ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = one !== tab;
  }
  document.querySelector(".widths").hidden = tab.id !== "tab-preview";
}

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    choose(next);
    next.focus();
  });
});

for (const id of ["wide", "narrow"])
  $(id).addEventListener("click", () => {
    $("preview-panel").classList.toggle("phone", id === "narrow");
    $("wide").setAttribute("aria-pressed", id === "wide");
    $("narrow").setAttribute("aria-pressed", id === "narrow");
  });

function ask(text) {
  if (!text.trim()) return;
  send("prompt", { text, agent: $("agent").value });
  $("text").value = "";
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (isBusy) send("stop");
  else ask($("text").value);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!isBusy) ask($("text").value);
  }
});
$("clear").addEventListener("click", () => send("clear"));

async function begin() {
  about = await (await fetch("about")).json();
  $("instance").textContent = about.instance ?? "";
  $("open").href = `${about.preview}/`;
  $("agent").replaceChildren(...about.agents.map((name) => new Option(name, name)));
  $("examples").replaceChildren(
    ...about.examples.map((text) => {
      const button = element("button", "", text.replace("Build a ", ""));
      button.type = "button";
      button.addEventListener("click", () => ask(text));
      return button;
    }),
  );
  showFiles([]);
  const source = new EventSource("events");
  source.onopen = () => {
    setBusy(null);
    SHOW.cleared();
  };
  source.onmessage = (event) => show(JSON.parse(event.data));
}

begin();
