// Server-sent events of a fetched body. EventSource sends no key and no POST, and tells nothing of a refusal.

/** Yields { event, data, at }: `at` is the moment (performance.now) at which the bytes that completed the event were here. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let isOver = false;
  try {
    while (!isOver) {
      let chunk;
      try {
        chunk = await reader.read();
      } catch (error) {
        isOver = true; // broken or aborted: there is nothing left to cancel
        throw error;
      }
      const at = performance.now();
      if (chunk.done) {
        isOver = true;
        return;
      }
      rest += decoder.decode(chunk.value, { stream: true });
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const parsed = parse(block);
        if (parsed !== null) yield { ...parsed, at };
      }
    }
  } finally {
    if (!isOver) await reader.cancel();
  }
}

function parse(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line.startsWith("event:")) event = line.slice(6).trim();
  }
  return data.length ? { event, data: data.join("\n") } : null; // a comment keeps the connection alive, no more
}
