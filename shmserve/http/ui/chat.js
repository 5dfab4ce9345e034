// The conversation: sends it, shows what comes, stops. One answer at a time.

import { ask, keyOf, Refusal } from "./api.js";
import { Answer, question } from "./answer.js";
import { byId, make, tell } from "./dom.js";
import { openSettings, requestFields, systemPrompt } from "./settings.js";
import { events } from "./sse.js";
import { many } from "./stats.js";

const EXAMPLES = ["Why is the sky blue?", "Explain a ring buffer to a child.", "Write a short story about a slow network."];
const NEAR_END_PX = 80;
const ENDS = { length: "reached its limit", stop: "", tool_calls: "called a tool", content_filter: "filtered" };

const transcript = byId("transcript");
const prompt = byId("prompt");
const sendButton = byId("send");
const stopButton = byId("stop");
const clearButton = byId("clear");
const announcer = byId("announcer");

let messages = []; // as the API has them
let running = null; // the AbortController of the answer that comes
let isFollowing = true; // the end of the text was in sight when somebody last scrolled: it is to stay so

export function prepareChat() {
  byId("examples").append(
    ...EXAMPLES.map((text) => {
      const button = make("button", { type: "button", class: "quiet", text });
      button.addEventListener("click", () => send(text));
      return make("li", {}, button);
    }),
  );
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(prompt.value);
  });
  prompt.addEventListener("input", onInput);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(prompt.value);
    }
  });
  stopButton.addEventListener("click", stop);
  clearButton.addEventListener("click", clear);
  transcript.addEventListener("scroll", onScroll, { passive: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running !== null && !byId("settings").open) {
      event.preventDefault();
      stop();
    }
  });
  onInput();
}

/** Show something that the person should do, with a button for it; "" takes it away. */
export function notify(text, action = null, onAction = null) {
  byId("notice").hidden = !text;
  tell(byId("notice-text"), text);
  const button = byId("notice-action");
  button.hidden = action === null;
  if (action === null) return;
  button.textContent = action;
  button.onclick = onAction;
}

function onInput() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, innerHeight * 0.3)}px`;
  sendButton.disabled = prompt.value.trim() === "";
}

function send(text) {
  if (running !== null || text.trim() === "") return;
  byId("blank").hidden = true;
  // What nobody answered is not sent again: many templates refuse two questions in a row, and one that was too long would be refused for ever.
  if (messages.at(-1)?.role === "user") {
    messages.pop();
    for (const retry of transcript.querySelectorAll(".failure button")) retry.remove();
  }
  messages.push({ role: "user", content: text.trim() });
  question(transcript, text.trim());
  prompt.value = "";
  onInput();
  answer();
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  messages = [];
  for (const message of transcript.querySelectorAll(".message")) message.remove();
  byId("blank").hidden = false;
  clearButton.disabled = true;
  prompt.focus();
}

/** Ask for the answer to `messages`, and show it until it ends. */
async function answer() {
  const controller = new AbortController();
  const asked = messages;
  running = controller;
  setRunning(true);
  const shown = new Answer(transcript, performance.now());
  isFollowing = true;
  keepAtEnd();
  const system = systemPrompt();
  const body = {
    ...requestFields(),
    messages: system ? [{ role: "system", content: system }, ...asked] : asked,
    stream: true,
    stream_options: { include_usage: true },
  };
  try {
    const response = await ask("/v1/chat/completions", { body, signal: controller.signal });
    notify("");
    const { how, numTokens } = await follow(response, shown);
    shown.end(how, numTokens);
    asked.push({ role: "assistant", content: shown.text });
    tell(announcer, `Answer complete, ${many(numTokens ?? shown.intervals.length + 1, "token")}.`);
  } catch (error) {
    if (controller.signal.aborted) {
      shown.end("stopped");
      if (shown.text) asked.push({ role: "assistant", content: shown.text });
      else asked.pop(); // no answer to it: it would be asked twice in a row
      tell(announcer, "Stopped.");
    } else {
      shown.end("broken off");
      fail(error, shown, asked);
    }
  } finally {
    if (running === controller) {
      running = null;
      setRunning(false);
    }
    keepAtEnd();
  }
}

async function follow(response, shown) {
  let how = "";
  let numTokens = null;
  let isWhole = false;
  for await (const { data, at } of events(response.body)) {
    if (data === "[DONE]") {
      isWhole = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.status ?? 200, chunk.error.message, chunk.error.code, 0);
    const [choice] = chunk.choices;
    if (choice !== undefined) {
      const { content, reasoning_content: thought } = choice.delta;
      if (thought) shown.add(thought, at, { isThought: true });
      if (content) shown.add(content, at);
      if (choice.finish_reason) how = ENDS[choice.finish_reason] ?? choice.finish_reason;
      if (thought || content) keepAtEnd();
    }
    if (chunk.usage) numTokens = chunk.usage.completion_tokens;
  }
  if (!isWhole) throw new TypeError("the connection ended in the middle of the answer");
  return { how, numTokens };
}

function fail(error, shown, asked) {
  if (error instanceof Refusal && error.status === 401) {
    // As if it had not been sent: the words go back to where they can be sent again.
    shown.element.remove();
    transcript.lastElementChild.remove();
    const { content } = asked.pop();
    prompt.value ||= content;
    byId("blank").hidden = asked.length > 0;
    onInput();
    askForKey();
    return;
  }
  const isServers = error instanceof Refusal;
  const words = isServers ? error.message : "The connection to the server broke.";
  if (!isServers) console.info("the answer broke off:", error.message);
  shown.fail(words, () => {
    if (running !== null || asked !== messages) return;
    shown.element.remove();
    answer();
  });
  tell(announcer, `The answer failed: ${words}`);
}

/** The server wants a key, or another one: say so, and offer the field for it. */
export function askForKey() {
  const what = keyOf("api") ? "This server does not take that API key." : "This server answers only with an API key (--api-key).";
  notify(what, "Enter the key", () => openSettings("api-key"));
}

function setRunning(isRunning) {
  transcript.setAttribute("aria-busy", String(isRunning));
  const hadFocus = document.activeElement === sendButton || document.activeElement === stopButton;
  sendButton.hidden = isRunning;
  stopButton.hidden = !isRunning;
  clearButton.disabled = transcript.querySelector(".message") === null; // what was stopped before any text is in no message
  if (hadFocus) (isRunning ? stopButton : prompt).focus();
}

function onScroll() {
  isFollowing = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < NEAR_END_PX;
}

/** Follow the end of the text, however much came at once, unless the reader has scrolled away from it. */
function keepAtEnd() {
  if (isFollowing) transcript.scrollTop = transcript.scrollHeight;
}
