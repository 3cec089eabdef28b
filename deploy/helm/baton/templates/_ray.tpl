{{- /* Ray nodes. Ray stands beside a worker, not above it: see "Ray" in the README. */ -}}

{{- define "baton.rayEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {{- include "baton.secretKey" (dict "root" . "reference" .Values.ray.tokenSecret) | nindent 4 }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_DISABLE_IMPORT_WARNING, value: "1"}
{{- /* While the head is replaced, nodes wait for it (its state is in Redis) and do not end: the first by seconds, the second
       by looks, two seconds apart, of a node that starts. */}}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
- {name: RAY_NUM_REDIS_GET_RETRIES, value: "150"}
{{- end -}}

{{- /* Image of Ray's head, and of the Job that deploys to another one: that of decode workers, or of prefill workers where only
       these need Ray, because the others' image may then do without its packages. */ -}}
{{- define "baton.rayImage" -}}
{{- $values := .Values -}}
{{- $role := "decode" -}}
{{- if and (eq $values.ray.mode "embedded") (not $values.ray.joinWorkers) (eq (int $values.decode.nodes) 1) (gt (int $values.prefill.nodes) 1) }}{{ $role = "prefill" }}{{ end -}}
{{- $pool := index $values $role -}}
{{- include "baton.image" (dict "root" . "role" $role "override" ($values.ray.head.image | default $pool.image) "gpus" $pool.gpus) -}}
{{- end -}}

{{- /* Whether a worker's further ranks are pods that Ray brings to it: it spans several, and they are no LeaderWorkerSet, whose groups
       are Ray clusters of their own. Takes root, pool. */ -}}
{{- define "baton.spansByRay" -}}
{{- if and (eq .root.Values.ray.mode "embedded") (gt (int .pool.nodes) 1) (not (include "baton.inGroups" .)) }}true{{ end -}}
{{- end -}}

{{- /* Whether the chart starts a Ray with a head of its own: where a worker needs it, or its nodes were asked for beside workers that do
       without. Where all workers are in LeaderWorkerSets none of their pods could join it. */ -}}
{{- define "baton.rayRuns" -}}
{{- $prefill := dict "root" . "pool" .Values.prefill -}}
{{- $decode := dict "root" . "pool" .Values.decode -}}
{{- if eq .Values.ray.mode "kuberay" }}true
{{- else if or (include "baton.spansByRay" $prefill) (include "baton.spansByRay" $decode) }}true
{{- else }}{{ include "baton.joinsWorkers" . }}{{ end -}}
{{- end -}}

{{- /* Whether workers that do without Ray get a node of the chart's beside them, because that was asked for. */ -}}
{{- define "baton.joinsWorkers" -}}
{{- $grouped := not .Values.models -}}
{{- range $role := list "prefill" "decode" }}{{ $grouped = and $grouped (include "baton.inGroups" (dict "root" $ "pool" (index $.Values $role))) }}{{ end -}}
{{- if and .Values.ray.joinWorkers (eq .Values.ray.mode "embedded") (not $grouped) }}true{{ end -}}
{{- end -}}

{{- /* Whether some pod has Ray's token: of the chart's Ray, of another one, or of a LeaderWorkerSet, whose groups are Rays of their own. */ -}}
{{- define "baton.rayTokenIsUsed" -}}
{{- if or (include "baton.rayRuns" .) (eq .Values.ray.mode "external") }}true
{{- else }}{{ range list .Values.prefill .Values.decode }}{{ include "baton.inGroups" (dict "root" $ "pool" .) }}{{ end }}{{ end -}}
{{- end -}}

{{- /* Whether workers are the chart's own StatefulSets, and not Ray Serve's. */ -}}
{{- define "baton.workersAreSets" -}}{{ if has .Values.ray.mode (list "none" "embedded") }}true{{ end }}{{- end -}}

{{- /* Where Ray keeps its cluster's state. */ -}}
{{- define "baton.rayRedisAddress" -}}
{{- .Values.ray.gcsFaultTolerance.address | default (printf "%s://%s:%d" (include "baton.redisScheme" .) (include "baton.redisHost" .) (int .Values.redis.port)) -}}
{{- end -}}

{{- /* Whether that is the chart's Redis, where Ray has a user of its own. */ -}}
{{- define "baton.rayKeepsHere" -}}
{{- $fault := .Values.ray.gcsFaultTolerance -}}
{{- if and .Values.redis.enabled (include "baton.rayRuns" .) $fault.enabled (not $fault.address) }}true{{ end -}}
{{- end -}}

{{- /* The authority of the chart's Redis, for Ray's head: without a key. */ -}}
{{- define "baton.rayRedisTls" -}}
{{- if and .Values.tls.enabled (include "baton.rayKeepsHere" .) }}true{{ end -}}
{{- end -}}

{{- define "baton.rayRedisCaEnv" -}}
{{- if include "baton.rayRedisTls" . }}
- {name: RAY_REDIS_CA_CERT, value: /etc/baton/redis-ca/ca.crt}
{{- end }}
{{- end -}}

{{- define "baton.rayRedisCaMount" -}}
{{- if include "baton.rayRedisTls" . }}
- {name: redis-ca, mountPath: /etc/baton/redis-ca, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.rayRedisCaVolume" -}}
{{- if include "baton.rayRedisTls" . }}
- {name: redis-ca, secret: {secretName: {{ include "baton.tlsSecret" (dict "root" . "role" "redis") }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}}
{{- end }}
{{- end -}}

{{- define "baton.rayRedisPassword" -}}
{{- $fault := .Values.ray.gcsFaultTolerance -}}
{{- if $fault.passwordSecret.name -}}
{{- include "baton.secretKey" (dict "root" . "reference" $fault.passwordSecret) -}}
{{- else if include "baton.rayKeepsHere" . -}}
{{- include "baton.secretKey" (dict "root" . "reference" (dict "name" "" "key" "ray-redis-password")) -}}
{{- end -}}
{{- end -}}

{{- define "baton.rayPortFlags" -}}
{{- $ports := .Values.ray.ports -}}
- --node-manager-port={{ $ports.nodeManager }}
- --object-manager-port={{ $ports.objectManager }}
- --runtime-env-agent-port={{ $ports.runtimeEnvAgent }}
- --dashboard-agent-grpc-port={{ $ports.dashboardAgentGrpc }}
- --dashboard-agent-listen-port={{ $ports.dashboardAgentHttp }}
- --metrics-export-port={{ $ports.metrics }}
{{- if $ports.firstWorker }}
- --min-worker-port={{ $ports.firstWorker }}
- --max-worker-port={{ $ports.lastWorker }}
{{- end }}
- --object-store-memory={{ int64 .Values.ray.objectStoreBytes }}
- --disable-usage-stats
- --temp-dir=/tmp/ray
{{- end -}}

{{- define "baton.rayContainerPorts" -}}
{{- range $name, $field := dict "ray-node" "nodeManager" "ray-objects" "objectManager" "ray-env" "runtimeEnvAgent" "ray-agent-grpc" "dashboardAgentGrpc" "ray-agent-http" "dashboardAgentHttp" "ray-metrics" "metrics" }}
{{- $port := index $.Values.ray.ports $field }}
{{- if $port }}
- {name: {{ $name }}, containerPort: {{ $port }}}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Goes before the command of a container's first process, to which the kernel delivers only signals that it handles.
       `ray start` handles SIGTERM once it is connected: a pod whose head is gone would stay until its grace period is over. */ -}}
{{- define "baton.endedBySigterm" -}}
- python3
- -IS
- -c
- |
  import os, signal, sys
  child = 0
  def end(*_):
      if child:
          os.kill(child, signal.SIGTERM)
      else:
          sys.exit(128 + signal.SIGTERM)
  signal.signal(signal.SIGTERM, end)
  child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
  while True:
      ended, status = os.wait()  # also processes whose parents have ended
      if ended == child:
          code = os.waitstatus_to_exitcode(status)
          sys.exit(code if code >= 0 else 128 - code)
{{- end -}}

{{- /* A Ray node beside a worker, or the place of its further ranks. Takes root, pool, role, image, resource, gpus; group (leader, rank)
       in a LeaderWorkerSet, of which each group is a Ray cluster of its own with its leader as head. */ -}}
{{- define "baton.rayNode" -}}
- name: ray
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- $group := .group | default "" }}
  command:
    {{- include "baton.endedBySigterm" . | nindent 4 }}
    {{- if eq $group "rank" }}
    - python3
    - -c
    - |
      {{- include "baton.whenLeaderListens" . | nindent 6 }}
    {{- end }}
    - ray
    - start
    - --block
  args:
    {{- if eq $group "leader" }}
    - --head
    - --port={{ .root.Values.ray.ports.gcs }}
    - --include-dashboard=False
    - --include-log-monitor=False
    {{- else if eq $group "rank" }}
    - --address=$(LWS_LEADER_ADDRESS):{{ .root.Values.ray.ports.gcs }}
    {{- else }}
    - --address={{ include "baton.rayHead" .root }}:{{ .root.Values.ray.ports.gcs }}
    {{- end }}
    - --node-ip-address=$(POD_IP)
    - --num-cpus={{ .pool.tensorParallel }}
    - --num-gpus={{ .gpus }}
    - {{ printf "--resources={\"%s\": 1}" .resource | squote }}
    {{- include "baton.rayPortFlags" .root | nindent 4 }}
  env:
    {{- include "baton.podEnv" .root | nindent 4 }}
    {{- include "baton.scratchEnv" .root | nindent 4 }}
    {{- include "baton.rayEnv" .root | nindent 4 }}
    {{- if hasSuffix "-ranks" .resource }}
    {{- include "baton.rankEnv" . | nindent 4 }}
    - {name: BATON_LEAVING_FILE, value: /tmp/baton-leaving}
    {{- /* Such as NCCL's. No secrets: jobs that are submitted to Ray run in this container. */}}
    {{- range .pool.pod.extraEnv }}
    {{- if not (dig "valueFrom" "secretKeyRef" "" .) }}{{ list . | toYaml | nindent 4 }}{{ end }}
    {{- end }}
    {{- end }}
  {{- $ports := include "baton.rayContainerPorts" .root | trim }}
  {{- if or $ports (eq $group "leader") }}
  ports:
    {{- if eq $group "leader" }}
    - {name: gcs, containerPort: {{ .root.Values.ray.ports.gcs }}}
    {{- end }}
    {{- with $ports }}{{ . | nindent 4 }}{{ end }}
  {{- end }}
  {{- if gt (int .pool.nodes) 1 }}
  lifecycle:
    preStop:
      exec:
        command:
          - python3
          - -c
          - |
            {{- include (ternary "baton.untilRanksLeft" "baton.untilWorkerLeft" (hasSuffix "-ranks" .resource)) . | nindent 12 }}
  {{- end }}
{{- end -}}

{{- /* A worker that spans pods drains by the Ray nodes that it stands on, and their containers get SIGTERM when the pod does: they
       hold it back, as long as the grace period lets them, until the worker next door no longer answers … */ -}}
{{- define "baton.untilWorkerLeft" -}}
import os, socket, time
end = time.monotonic() + {{ include "baton.holdSeconds" . }}
while time.monotonic() < end:
    try:
        socket.create_connection((os.environ["POD_IP"], {{ .pool.metricsPort }}), 2).close()
    except ConnectionRefusedError:
        break
    except OSError:
        pass
    time.sleep(1)
{{- end -}}

{{- /* … or, where a rank's worker is in another pod, until no rank is left in this container (RankHost, worker/ranks/remote.py). The file
       tells them that this pod goes, so that their worker drains (worker/ranks/process.py). */ -}}
{{- define "baton.untilRanksLeft" -}}
import glob, os, time
open(os.environ["BATON_LEAVING_FILE"], "w").close()
def title(file):
    try:
        return open(file, "rb").read()
    except OSError:
        return b""
end = time.monotonic() + {{ include "baton.holdSeconds" . }}
while time.monotonic() < end:
    if not any(title(file).startswith(b"ray::RankHost") for file in glob.glob("/proc/[0-9]*/cmdline")):
        break
    time.sleep(1)
{{- end -}}

{{- define "baton.holdSeconds" -}}
{{- max (int .pool.drainSeconds) (sub (int .pool.terminationGracePeriodSeconds) 5) -}}
{{- end -}}

{{- /* Probes of Ray's nodes where KubeRay starts them. Without probes of ours the operator writes its own: they call wget, which the
       images lack, and ask a worker for Serve's proxy, which does not run here (proxy_location: Disabled). */ -}}
{{- define "baton.kuberayHeadProbes" -}}
startupProbe:
  tcpSocket: {port: gcs-server}
  periodSeconds: 2
  failureThreshold: 60
{{- /* Ready for the operator, which gives the dashboard the application. */}}
readinessProbe:
  tcpSocket: {port: dashboard}
  periodSeconds: 5
{{- /* A head that hangs still accepts connections. */}}
livenessProbe:
  grpc: {port: {{ .Values.ray.ports.gcs }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- /* Is the raylet there? Its Unix socket says so whatever ports Ray was given. A worker's engine that hangs is Serve's to notice
       (check_health in baton/ray_pools/replica.py), so liveness does not ask for more. */ -}}
{{- define "baton.rayletThere" -}}
import socket
socket.socket(socket.AF_UNIX).connect("/tmp/ray/session_latest/sockets/raylet")
{{- end -}}

{{- /* And the worker, if there is one: the pod comes first and Serve places a worker in it later, or none while the pool is small. Not
       ready until then, it would keep the operator's cluster unready and use up the disruption budget. From then on ready
       means what it means everywhere: loaded, registered and not draining. */ -}}
{{- define "baton.rayletReady" -}}
{{ include "baton.rayletThere" . }}
import http.client, os, sys
worker = http.client.HTTPConnection(os.environ["POD_IP"], {{ .pool.metricsPort }}, timeout=5)
try:
    worker.request("GET", "/ready")
except ConnectionRefusedError:
    sys.exit(0)
sys.exit(worker.getresponse().status != 200)
{{- end -}}

{{- /* Takes pool. */ -}}
{{- define "baton.kuberayWorkerProbes" -}}
startupProbe:
  exec:
    command:
      - python3
      - -c
      - |
        {{- include "baton.rayletThere" . | nindent 8 }}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 24
readinessProbe:
  exec:
    command:
      - python3
      - -c
      - |
        {{- include "baton.rayletReady" . | nindent 8 }}
  periodSeconds: 5
  timeoutSeconds: 10
livenessProbe:
  exec:
    command:
      - python3
      - -c
      - |
        {{- include "baton.rayletThere" . | nindent 8 }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end -}}
