// One conversation with the gateway that serves this page, and what every answer cost.
//
// Whatever users, models or servers say enters the page as text nodes, never as markup.

const UPLOAD_FROM_BYTES = 4 << 20; // smaller files travel inside the request
const MAX_FILE_BYTES = 256 << 20;
const REFERENCE_LIFE_MS = 30 * 60_000; // half of what the gateway promises for an upload

const KINDS = ["image", "audio", "video"];
const ENDINGS = {
  image: "avif bmp tif tiff",
  audio: "aac aif aiff flac m4a oga opus",
  video: "avi mkv mov",
}; // of files whose type browsers do not tell

// Stages before the first token, in the order in which a request meets them.
const STAGES = ["queue", "fetch", "decode_media", "encode", "store", "prefill"];
const MODALITIES = ["text", "image", "video", "audio"];
const MARKS = {
  hit: ["●", "found in the store"],
  miss: ["○", "encoded for this answer"],
  joined: ["◐", "another request was already encoding it"],
  repaired: ["◍", "its entry was damaged and was encoded again"],
  bypass: ["◌", "the store was not asked"],
};

const EXAMPLES = [
  {
    title: "A picture",
    question: "What is in this picture?",
    media: [pictureFile],
    preview: [drawPicture],
  },
  {
    title: "A sound",
    question: "How many beeps do you hear?",
    media: [soundFile],
    preview: [drawSound],
  },
  {
    title: "Both at once",
    question: "What do you see and hear?",
    media: [pictureFile, soundFile],
    preview: [drawPicture, drawSound],
  },
];

const $ = (id) => document.getElementById(id);

let model = null; // entry of /v1/models, once it is known
let turns = []; // of the conversation, also those that failed
let attached = []; // to the question being written
let running = null; // AbortController of the answer being written

// ── conversation ──

/** Ask and show the answer as it comes. A turn that fails is not sent along with later ones. */
async function ask(question, media) {
  if (running) return;
  const controller = new AbortController();
  const turn = { question, media, content: "", reasoning: "", state: "running", request: null };
  const view = new TurnView(turn, turns.length + 1);
  const earlier = turns.filter(isKept);
  turns.push(turn);
  setRunning(controller);
  showTurn(view);
  let failure = null;
  try {
    turn.request = await requestBody([...earlier, turn], controller.signal);
    for await (const chunk of chatChunks(turn, controller.signal)) view.take(chunk);
    turn.state = "done";
  } catch (error) {
    turn.state = controller.signal.aborted ? "stopped" : "failed";
    failure = error;
  }
  if (running === controller) setRunning(null);
  const allMedia = [...earlier, turn].flatMap((each) => each.media);
  view.finish(failure, allMedia);
  if (!model) loadModel();
}

function isKept(turn) {
  return turn.state === "done" || (turn.state === "stopped" && turn.content !== "");
}

function showTurn(view) {
  for (const report of document.querySelectorAll(".report[open]")) report.open = false;
  $("welcome").hidden = true;
  $("reset").hidden = false;
  $("turns").append(view.element);
  scrollToEnd();
}

function setRunning(controller) {
  const hadFocus = document.activeElement === $("send") || document.activeElement === $("stop");
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  if (hadFocus) $(controller ? "stop" : "send").focus();
}

function reset() {
  running?.abort();
  setRunning(null);
  for (const medium of [...turns.flatMap((turn) => turn.media), ...attached]) medium.release();
  turns = [];
  attached = [];
  showTray();
  $("turns").replaceChildren();
  $("welcome").hidden = false;
  $("reset").hidden = true;
  $("question").focus();
  announce("The conversation is empty.");
}

/** Take a failed question back into the composer. */
function revise(turn, element) {
  turns = turns.filter((each) => each !== turn);
  attached.push(...turn.media);
  $("question").value = turn.question;
  element.remove();
  showTray();
  fitQuestion();
  $("question").focus();
}

// ── talking to the gateway ──

class GatewayError extends Error {
  constructor({ message, code, param }, requestId, retryAfterS) {
    super(message ?? "The gateway gave no reason.");
    Object.assign(this, { code, param, requestId, retryAfterS });
  }

  static async of(response) {
    const body = await response.json().catch(() => ({}));
    const error = body.error ?? { message: `The gateway answered HTTP ${response.status}.` };
    return new GatewayError(
      error,
      response.headers.get("x-request-id"),
      response.headers.get("retry-after"),
    );
  }
}

async function requestBody(conversation, signal) {
  const messages = [];
  for (const turn of conversation) {
    const parts = [];
    for (const medium of turn.media) parts.push(await medium.part(signal));
    if (turn.question) parts.push({ type: "text", text: turn.question });
    messages.push({ role: "user", content: turn.media.length ? parts : turn.question });
    if (turn.state === "running") continue;
    const answer = { role: "assistant", content: turn.content };
    if (turn.reasoning) answer.reasoning_content = turn.reasoning;
    messages.push(answer);
  }
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  if (model) body.model = model.id;
  const options = ["max-tokens", "temperature", "thinking"].map((id) => $(id).value);
  const [maxTokens, temperature, thinking] = options;
  if (maxTokens) body.max_tokens = Number(maxTokens);
  if (temperature) body.temperature = Number(temperature);
  if (thinking) body.chat_template_kwargs = { enable_thinking: thinking === "on" };
  return body;
}

/** The chunks of an answer. Throws unless the answer is complete. */
async function* chatChunks(turn, signal) {
  const response = await send("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(turn.request),
    signal,
  });
  turn.requestId = response.headers.get("x-request-id");
  for await (const data of serverSentEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new GatewayError(chunk.error, chunk.error.request_id ?? turn.requestId);
    yield chunk;
  }
  throw new GatewayError(
    { message: "The connection broke before the answer was complete." },
    turn.requestId,
  );
}

async function* serverSentEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new GatewayError({ message: "The gateway cannot be reached." });
  }
  if (!response.ok) throw await GatewayError.of(response);
  return response;
}

async function loadModel() {
  try {
    const list = await (await send("/v1/models")).json();
    model = list.data[0];
    $("model").replaceChildren(
      model.id,
      h("span", {}, ` · ${count(model.max_model_len, "token")}`),
    );
  } catch (error) {
    $("model").textContent = "not reachable";
    $("model").title = error.message;
  }
}

// ── media ──

/** A file on its way into a question. */
class Attachment {
  #part = null;
  #madeAt = 0;

  constructor(file) {
    this.file = file;
    this.kind = kindOf(file);
    this.url = URL.createObjectURL(file);
  }

  get name() {
    return this.file.name || this.kind;
  }

  /** The content part that stands for it. Large files are uploaded and referred to. */
  async part(signal) {
    const isUpload = this.file.size > UPLOAD_FROM_BYTES;
    if (!this.#part || (isUpload && Date.now() - this.#madeAt > REFERENCE_LIFE_MS)) {
      const url = isUpload ? await upload(this.file, signal) : await dataUrl(this.file);
      this.#part = contentPart(this.kind, url, this.name);
      this.#madeAt = Date.now();
    }
    return this.#part;
  }

  isSentAs(part) {
    return part === this.#part;
  }

  player() {
    const { kind, name, url: src } = this;
    if (kind === "file") return icon("file");
    if (kind === "image") return h("img", { src, alt: name });
    const look = { controls: true, playsinline: true, preload: "metadata" };
    return h(kind, { src, ...look, "aria-label": name });
  }

  release() {
    URL.revokeObjectURL(this.url);
  }
}

function kindOf(file) {
  const family = file.type.split("/")[0];
  if (KINDS.includes(family)) return family;
  const ending = file.name.split(".").pop().toLowerCase();
  return KINDS.find((kind) => ENDINGS[kind].split(" ").includes(ending)) ?? "file";
}

/** A part of kind "file" leaves it to the gateway to find out what the file is. */
function contentPart(kind, url, name) {
  if (kind === "file") return { type: "file", file: { file_data: url, filename: name } };
  const type = `${kind}_url`;
  return { type, [type]: { url } };
}

async function upload(file, signal) {
  const response = await send("/v1/media", { method: "POST", body: file, signal });
  return `media:${(await response.json()).media_ref}`;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new GatewayError({ message: `${file.name} cannot be read.` }));
    reader.readAsDataURL(file);
  });
}

function attach(files) {
  const refusals = [];
  for (const file of files) {
    const medium = new Attachment(file);
    const refusal = refusalOf(medium);
    if (refusal) {
      refusals.push(refusal);
      medium.release();
    } else {
      attached.push(medium);
      announce(`${medium.name} is attached.`);
    }
  }
  $("notice").textContent = refusals.join(" ");
  $("notice").hidden = refusals.length === 0;
  showTray();
}

function refusalOf({ file, kind, name }) {
  if (file.size === 0) return `${name} is empty.`;
  if (file.size > MAX_FILE_BYTES) return `${name} is larger than ${formatBytes(MAX_FILE_BYTES)}.`;
  const inputs = model?.capabilities?.input;
  if (kind !== "file" && inputs && !inputs.includes(kind))
    return `${model.id} takes no ${kind} input.`;
  return null;
}

function detach(medium) {
  const index = attached.indexOf(medium);
  attached.splice(index, 1);
  medium.release();
  showTray();
  const buttons = $("tray").querySelectorAll("button");
  (buttons[Math.min(index, buttons.length - 1)] ?? $("question")).focus();
  announce(`${medium.name} is removed.`);
}

function showTray() {
  $("tray").hidden = attached.length === 0;
  $("tray").replaceChildren(...attached.map((medium) => mediumCard(medium, removeButton(medium))));
}

function removeButton(medium) {
  const label = `Remove ${medium.name}`;
  const onclick = () => detach(medium);
  const look = { type: "button", class: "remove", title: label, "aria-label": label };
  return h("button", { ...look, onclick }, icon("remove"));
}

function mediumCard(medium, control = null) {
  const caption = h(
    "p",
    { class: "caption" },
    h("span", { class: "name", title: medium.name }, medium.name),
    h("span", {}, formatBytes(medium.file.size)),
    control,
  );
  const player = medium.player();
  // A file that this browser cannot show may still be one that the gateway reads, or a broken one.
  player.addEventListener("error", () => player.replaceWith(icon(medium.kind)), { once: true });
  return h("li", { class: `medium ${medium.kind}` }, player, caption);
}

// ── one turn on the page ──

/** A question and the answer below it. */
class TurnView {
  #turn;
  #content = document.createTextNode("");
  #reasoning = document.createTextNode("");
  #thoughts;
  #thoughtsTitle = h("summary", {}, "Thinking");
  #answer;
  #footer = h("div", { class: "footer" });
  #usage = null;
  #report = null;
  #finishReason = null;
  #unsaid = ""; // text that has not been announced yet

  constructor(turn, number) {
    this.#turn = turn;
    this.#thoughts = h(
      "details",
      { class: "thoughts", hidden: true },
      this.#thoughtsTitle,
      h("p", { dir: "auto" }, this.#reasoning),
    );
    this.#answer = h("p", { class: "answer", dir: "auto" }, this.#content);
    const media = h(
      "ul",
      { class: "media", "aria-label": "Media of the question" },
      ...turn.media.map((medium) => mediumCard(medium)),
    );
    this.element = h(
      "li",
      { class: "turn running" },
      h(
        "article",
        { "aria-label": `Question ${number}` },
        turn.media.length ? media : null,
        turn.question ? h("p", { class: "question", dir: "auto" }, turn.question) : null,
      ),
      h(
        "article",
        { "aria-label": `Answer ${number}` },
        this.#thoughts,
        this.#answer,
        this.#footer,
      ),
    );
  }

  take(chunk) {
    const follows = isAtEnd();
    for (const { delta, finish_reason: reason } of chunk.choices) {
      if (delta.reasoning_content) this.#think(delta.reasoning_content);
      if (delta.content) this.#say(delta.content);
      this.#finishReason = reason ?? this.#finishReason;
    }
    this.#usage = chunk.usage ?? this.#usage;
    this.#report = chunk.mimo ?? this.#report;
    if (follows) scrollToEnd();
  }

  /** The answer is over, one way or another. ``media`` are those of the whole request. */
  finish(failure, media) {
    if (!this.element.isConnected) return; // the conversation was reset
    const follows = isAtEnd();
    const { state, request } = this.#turn;
    this.element.classList.remove("running");
    const tokens = this.#usage?.completion_tokens_details?.reasoning_tokens;
    if (tokens) this.#thoughtsTitle.textContent = `Thinking, ${count(tokens, "token")}`;
    if (state === "failed") this.#showError(failure, media);
    if (state === "stopped") this.#note("Stopped.", this.#turn.requestId);
    if (this.#finishReason === "length") this.#note("Cut off at the token limit; see Options.");
    if (this.#report) this.#footer.append(reportView(this.#usage, this.#report, media));
    if (state !== "failed" && request) this.#footer.append(this.#actions());
    const outcome = { done: "The answer is complete.", stopped: "Stopped.", failed: "" }[state];
    announce(`${this.#unsaid} ${outcome}`);
    if (follows) scrollToEnd();
  }

  #think(text) {
    this.#thoughts.hidden = false;
    this.#turn.reasoning += text;
    this.#reasoning.appendData(text);
  }

  #say(text) {
    this.#turn.content += text;
    this.#content.appendData(text);
    // Whole sentences only: a screen reader that is handed single tokens stammers.
    this.#unsaid += text;
    const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => this.#unsaid.lastIndexOf(mark)));
    if (end >= 0) {
      announce(this.#unsaid.slice(0, end + 1));
      this.#unsaid = this.#unsaid.slice(end + 1);
    }
  }

  #showError(error, media) {
    const sent = /^messages\[(\d+)\]\.content\[(\d+)\]/.exec(error.param ?? "");
    const part = sent && this.#turn.request.messages[sent[1]]?.content[sent[2]];
    const culprit = part && media.find((medium) => medium.isSentAs(part));
    const facts = [
      ["code", error.code],
      ["param", error.param],
      ["file", culprit?.name],
      ["request", error.requestId],
      ["retry after", error.retryAfterS && `${error.retryAfterS} s`],
    ];
    this.#footer.append(
      h(
        "div",
        { class: "error", role: "alert" },
        h("p", { dir: "auto" }, error.message),
        factList(facts.filter(([, value]) => value)),
        button("edit", "Edit and ask again", () => revise(this.#turn, this.element)),
      ),
    );
  }

  #note(text, requestId) {
    const code = requestId ? h("code", {}, requestId) : null;
    this.#footer.append(h("p", { class: "note" }, `${text} `, code));
  }

  #actions() {
    const { content, request } = this.#turn;
    const copyButton = (label, text) =>
      button("copy", label, (event) => copy(text, event.currentTarget));
    return h(
      "p",
      { class: "actions" },
      content ? copyButton("Copy answer", content) : null,
      copyButton("Copy as curl", curl(request)),
    );
  }
}

/** A request as a shell command. The body is a here-document, so its size does not matter. */
function curl(body) {
  const url = `${location.origin}/v1/chat/completions`;
  const command = `curl -N ${url} -H 'content-type: application/json' -d @- <<'JSON'`;
  return `${command}\n${JSON.stringify(body, null, 2)}\nJSON\n`;
}

// ── what an answer cost ──

function reportView(usage, report, media) {
  const { timings_ms: timings, items, speculation, request_id: requestId } = report;
  const drafts = draftsView(speculation);
  return h(
    "details",
    { class: "report", open: true },
    h("summary", {}, ...headline(usage, timings)),
    h("h3", {}, "Time"),
    timeView(timings),
    h("h3", {}, count(usage.prompt_tokens, "prompt token")),
    promptView(usage.prompt_tokens_details),
    items.length ? h("h3", {}, "Embeddings") : null,
    items.length
      ? h("ul", { class: "items" }, ...items.map((item) => itemView(item, media)))
      : null,
    drafts && h("h3", {}, "Multi-token prediction"),
    drafts,
    factList([["request", requestId]]),
  );
}

function headline(usage, timings) {
  const seconds = (timings.total - timings.first_token) / 1000;
  const rate = (usage.completion_tokens - 1) / seconds;
  const parts = [
    ["total", formatMs(timings.total)],
    ["first token", formatMs(timings.first_token)],
    ["answer", count(usage.completion_tokens, "token")],
  ];
  if (rate > 0 && Number.isFinite(rate))
    parts.push(["speed", `${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`]);
  return parts.map(([name, value]) => h("span", {}, h("small", {}, name), " ", h("b", {}, value)));
}

/** Stages up to the first token, then the generation. Stages overlap: where their sum exceeds the
 * time to the first token they are drawn smaller, so that the bar as a whole stays true. */
function timeView(timings) {
  const first = timings.first_token || timings.total;
  const stages = STAGES.map((name) => ({ name, value: timings[name] ?? 0 }));
  const sum = stages.reduce((total, { value }) => total + value, 0);
  const scale = Math.min(1, first / sum) || 0;
  const parts = stages.map((stage) => ({ ...stage, share: stage.value * scale }));
  if (first > sum) parts.push({ name: "other", value: first - sum });
  parts.push({ name: "generate", value: timings.total - first });
  return barWithLegend(parts, formatMs);
}

function promptView(details) {
  const parts = MODALITIES.map((name) => ({ name, value: details[`${name}_tokens`] ?? 0 }));
  const cached = { name: "cached", value: details.cached_tokens ?? 0, share: 0 };
  return barWithLegend([...parts, cached], (value) => value.toLocaleString("en"));
}

/** The legend says everything in words; the bar repeats it in lengths. */
function barWithLegend(parts, format) {
  const bar = h("div", { class: "bar", "aria-hidden": "true" });
  const legend = h("ul", { class: "legend" });
  for (const { name, value, share = value } of parts) {
    if (share > 0) {
      const segment = h("span", { class: name });
      segment.style.flexGrow = share;
      bar.append(segment);
    }
    legend.append(
      h(
        "li",
        { class: value > 0 ? "" : "none" },
        h("i", { class: name, "aria-hidden": "true" }),
        `${name.replace("_", " ")} `,
        h("b", {}, format(value)),
      ),
    );
  }
  return h("div", { class: "chart" }, bar, legend);
}

function itemView(item, media) {
  const medium = media[item.index];
  const isSound = medium?.kind === "video" && item.modality === "audio";
  const name = medium ? medium.name + (isSound ? ", its sound" : "") : item.modality;
  const [mark, meaning] = MARKS[item.cache] ?? ["·", "not needed"];
  const numbers = [count(item.tokens, "token"), formatBytes(item.bytes)];
  if (item.encode_ms) numbers.push(`encoded in ${formatMs(item.encode_ms)}`);
  return h(
    "li",
    {},
    icon(item.modality),
    h("span", { class: "name", title: name }, name),
    h(
      "span",
      { class: `mark ${item.cache}`, title: meaning },
      h("span", { "aria-hidden": "true" }, mark),
      ` ${item.cache ?? "unused"}`,
    ),
    h("span", { class: "numbers" }, numbers.join(" · ")),
  );
}

/** How many drafts of each position were accepted; null when none were made. */
function draftsView({ drafted, accepted }) {
  if (!drafted.some((number) => number > 0)) return null;
  const rows = drafted.map((number, position) => {
    const rate = number ? accepted[position] / number : 0;
    const fill = h("span", {});
    fill.style.width = `${100 * rate}%`;
    return h(
      "li",
      {},
      `draft ${position + 1} `,
      h("span", { class: "meter", "aria-hidden": "true" }, fill),
      " ",
      h("b", {}, `${Math.round(100 * rate)} %`),
      ` accepted, ${accepted[position]} of ${number}`,
    );
  });
  return h("ul", { class: "drafts" }, ...rows);
}

function factList(facts) {
  return h(
    "dl",
    { class: "facts" },
    ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

// ── composer ──

function submit() {
  const question = $("question").value.trim();
  if (running || (!question && attached.length === 0)) return;
  const bad = [$("max-tokens"), $("temperature")].find((field) => !field.checkValidity());
  if (bad) {
    showOptions(true);
    bad.reportValidity();
    return;
  }
  const media = attached;
  attached = [];
  $("question").value = "";
  $("notice").hidden = true;
  showTray();
  fitQuestion();
  ask(question, media);
}

function showOptions(shown) {
  $("options").hidden = !shown;
  $("options-toggle").setAttribute("aria-expanded", String(shown));
}

function fitQuestion() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

function listen() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  $("question").addEventListener("input", fitQuestion);
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("reset").addEventListener("click", reset);
  $("options-toggle").addEventListener("click", () => showOptions($("options").hidden));
  $("attach").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", () => {
    attach($("files").files);
    $("files").value = "";
    $("question").focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  document.addEventListener("paste", (event) => {
    if (event.clipboardData.files.length === 0) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  });
  listenForDrops();
}

function listenForDrops() {
  const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    $("dropzone").hidden = false;
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) $("dropzone").hidden = true;
  });
  document.addEventListener("drop", (event) => {
    $("dropzone").hidden = true;
    if (!holdsFiles(event)) return;
    event.preventDefault();
    attach(event.dataTransfer.files);
    $("question").focus();
  });
}

// ── examples, drawn and sounded here ──

async function showExamples() {
  for (const { title, question, media, preview } of EXAMPLES) {
    const pictures = await Promise.all(preview.map((draw) => draw()));
    const start = async () => {
      $("question").focus();
      const files = await Promise.all(media.map((make) => make()));
      ask(
        question,
        files.map((file) => new Attachment(file)),
      );
    };
    const card = h(
      "button",
      { type: "button", onclick: start },
      h("span", { class: "preview", "aria-hidden": "true" }, ...pictures),
      h("b", {}, title),
      h("span", {}, question),
    );
    $("examples").append(h("li", {}, card));
  }
}

/** A red circle left of a blue square. */
function drawPicture() {
  const canvas = h("canvas", { width: 96, height: 96 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#ffffff";
  pen.fillRect(0, 0, 96, 96);
  pen.fillStyle = "#dc2828";
  pen.beginPath();
  pen.arc(27, 48, 17, 0, 2 * Math.PI);
  pen.fill();
  pen.fillStyle = "#2846d2";
  pen.fillRect(54, 32, 32, 32);
  return canvas;
}

async function pictureFile() {
  const blob = await new Promise((resolve) => drawPicture().toBlob(resolve, "image/png"));
  return new File([blob], "shapes.png", { type: "image/png" });
}

/** Three short beeps: a buffer of mono samples at 24 kHz. */
function beeps() {
  const context = new OfflineAudioContext(1, 1.25 * 24_000, 24_000);
  const tone = new OscillatorNode(context, { frequency: 880 });
  const volume = new GainNode(context, { gain: 0 });
  for (let beep = 0; beep < 3; beep++) {
    const start = 0.2 + 0.35 * beep;
    volume.gain.setValueAtTime(0, start);
    volume.gain.linearRampToValueAtTime(0.5, start + 0.01);
    volume.gain.setValueAtTime(0.5, start + 0.14);
    volume.gain.linearRampToValueAtTime(0, start + 0.15);
  }
  tone.connect(volume).connect(context.destination);
  tone.start();
  return context.startRendering();
}

async function drawSound() {
  const samples = (await beeps()).getChannelData(0);
  const canvas = h("canvas", { width: 192, height: 96 });
  const pen = canvas.getContext("2d");
  const columns = 48;
  pen.fillStyle = "#c77d1e";
  for (let column = 0; column < columns; column++) {
    const length = samples.length / columns;
    const loudest = samples
      .slice(column * length, (column + 1) * length)
      .reduce((peak, sample) => Math.max(peak, Math.abs(sample)), 0.03);
    pen.fillRect(column * 4 + 1, 48 - 76 * loudest, 2, 152 * loudest);
  }
  return canvas;
}

async function soundFile() {
  return new File([wav(await beeps())], "beeps.wav", { type: "audio/wav" });
}

/** A mono buffer as a WAV of 16-bit samples. */
function wav(buffer) {
  const samples = buffer.getChannelData(0);
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (offset, letters) =>
    [...letters].forEach((letter, index) => view.setUint8(offset + index, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // integers
  view.setUint16(22, 1, true); // one channel
  view.setUint32(24, buffer.sampleRate, true);
  view.setUint32(28, 2 * buffer.sampleRate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, index) => view.setInt16(44 + 2 * index, 32767 * sample, true));
  return view.buffer;
}

// ── elements, words and the clipboard ──

/** An element. Attributes named on… are listeners; children that are null are left out. */
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

function button(iconName, label, onclick) {
  return h(
    "button",
    { type: "button", class: "quiet", onclick },
    icon(iconName),
    h("span", {}, label),
  );
}

async function copy(text, clicked) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // browsers offer a clipboard to secure pages only
  }
  const label = clicked.querySelector("span");
  const words = label.dataset.words ?? label.textContent;
  label.dataset.words = words;
  label.textContent = "Copied";
  announce("Copied.");
  setTimeout(() => (label.textContent = words), 1500);
}

function copyBySelection(text) {
  const box = h("textarea", { class: "unseen", "aria-hidden": "true" });
  const focused = document.activeElement;
  box.value = text;
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
  focused?.focus();
}

function announce(text) {
  $("status").textContent = text.trim();
}

function isAtEnd() {
  return innerHeight + scrollY > document.documentElement.scrollHeight - 80;
}

function scrollToEnd() {
  scrollTo({ top: document.documentElement.scrollHeight });
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function formatMs(ms) {
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return `${ms > 0 && ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

function formatBytes(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  const power = bytes < 1024 ** 2 ? 1 : 2;
  const value = bytes / 1024 ** power;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${["", "KB", "MB"][power]}`;
}

listen();
loadModel();
showExamples();
if (matchMedia("(pointer: fine)").matches) $("question").focus();
