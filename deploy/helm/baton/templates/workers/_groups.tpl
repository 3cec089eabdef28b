{{- /* Workers that span pods: the pods of their further ranks, and LeaderWorkerSets that hold both. */ -}}

{{- /* Whether the workers of a pool are groups of a LeaderWorkerSet. Takes root, pool. */ -}}
{{- define "baton.inGroups" -}}
{{- if and (gt (int .pool.nodes) 1) (eq .root.Values.multiNode.by "leaderWorkerSet") }}true{{ end -}}
{{- end -}}

{{- /* Its name, which is that of its pods and of the Service that its controller makes too. Takes root, role. */ -}}
{{- define "baton.groupSetName" -}}{{ include "baton.base" .root }}-{{ .role }}-set{{- end -}}

{{- /* The LeaderWorkerSet as far as its leader's template, whose fields follow at an indent of four. Takes root, pool, component. */ -}}
{{- define "baton.groupSet" -}}
{{- $groups := .root.Values.multiNode -}}
{{- $annotations := dict -}}
{{- with $groups.exclusiveTopology }}{{ $_ := set $annotations "leaderworkerset.sigs.k8s.io/exclusive-topology" . }}{{ end -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {{- include "baton.metadata" (merge (dict "name" (include "baton.groupSetName" (dict "root" .root "role" .component)) "annotations" $annotations) .) | nindent 2 }}
spec:
 replicas: {{ include "baton.replicas" .pool }}
 startupPolicy: LeaderCreated
 rolloutStrategy:
  type: RollingUpdate
  rollingUpdateConfiguration: {maxUnavailable: {{ $groups.maxUnavailable }}, maxSurge: {{ $groups.maxSurge }}}
 leaderWorkerTemplate:
  size: {{ .pool.nodes }}
  # Ranks of a worker have to begin together: one that ends takes its group with it.
  restartPolicy: RecreateGroupOnPodRestart
  leaderTemplate:
{{- end -}}

{{- /* Pod template of a pod with further ranks. Takes root, role, pool, image, checksum; group (rank, in a LeaderWorkerSet). */ -}}
{{- define "baton.ranksTemplate" -}}
{{- $component := printf "%s-ranks" .role -}}
{{- $scope := merge (dict "component" $component "pod" .pool.pod "resource" $component "gpus" .pool.gpus "role" "worker") . -}}
metadata: {{- include "baton.podMetadata" $scope | nindent 2 }}
spec:
  {{- include "baton.podFields" $scope | nindent 2 }}
  {{- with include "baton.storeAccount" (dict "roots" (list .root)) | trim }}{{ . | nindent 2 }}{{ end }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ .pool.terminationGracePeriodSeconds }}
  {{- if or (include "baton.modelIsFetched" .root) .pool.pod.extraInitContainers }}
  initContainers:
    {{- include "baton.modelFetch" (dict "root" .root "image" .image "pod" .pool.pod) | trim | nindent 4 }}
    {{- with .pool.pod.extraInitContainers }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  containers:
    {{- include "baton.rayNode" $scope | nindent 4 }}
      securityContext: {{- include "baton.workerSecurity" $scope | nindent 8 }}
      resources: {{- include "baton.workerResources" $scope | nindent 8 }}
      volumeMounts: {{- include "baton.rankMounts" $scope | nindent 8 }}
  volumes: {{- include "baton.rankVolumes" $scope | nindent 4 }}
{{- end -}}

{{- /* A restarted container would restart the whole group, so a rank's node of Ray starts when its leader's listens. */ -}}
{{- define "baton.whenLeaderListens" -}}
import os, socket, sys, time
end = time.monotonic() + {{ int .root.Values.model.loadSeconds }}
while True:
    try:
        socket.create_connection((os.environ["LWS_LEADER_ADDRESS"], {{ .root.Values.ray.ports.gcs }}), 2).close()
        break
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(f"the leader of this group does not listen: {error}")
        time.sleep(1)
os.execvp(sys.argv[1], sys.argv[1:])
{{- end -}}
